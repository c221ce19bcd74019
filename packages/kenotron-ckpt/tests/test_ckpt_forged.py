"""Manifests that are forged, damaged, older or newer: refused with what is wrong, or read."""

import json

import pytest
import torch
from ckpt_formats import STATE, tensors, unpack
from test_ckpt_index import sealed

from kenotron_ckpt import load, read_manifest
from kenotron_ckpt.folder import LONGEST_MANIFEST, defect
from kenotron_ckpt.index import Manifest, UnknownVersion
from kenotron_ckpt.manifest_rules import WIDTHS
from kenotron_ckpt.part_files import CODES
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout

HUGE = 10**4000


def manifest():
    """The values of a manifest of one record in two pieces, with a checksum."""
    pieces = [
        {
            "file": "f", "key": f"x@{i}", "start": [2 * i, 0], "shape": [2, 3],
            "offset": 100 + 24 * i, "bytes": 24, "checksum": "0" * 16,
        }
        for i in range(2)
    ]  # fmt: skip
    return {
        "format": "kenotron-checkpoint", "version": 2, "min_reader": 2, "step": 7,
        "mesh": {"dp": 2},
        "state": {}, "rank_states": [], "config": None, "libraries": {"torch": "2"},
        "files": {"f": {"bytes": 148, "header": "0" * 16}},
        "records": {"x": {"shape": [4, 3], "dtype": "float32", "pieces": pieces}},
    }  # fmt: skip


def changed(path, value):
    """The text of that manifest with another value; `path` is dotted. None removes the key."""
    data = manifest()
    *parents, last = path.split("/")
    owner = data
    for part in parents:
        owner = owner[int(part) if isinstance(owner, list) else part]
    if value is ...:
        del owner[last]
    else:
        owner[int(last) if isinstance(owner, list) else last] = value
    return sealed(data)


def test_that_manifest_is_good():
    assert Manifest.from_json(sealed(manifest())).records["x"].numel == 12


PIECE = "records/x/pieces/1"
FORGED = [
    ("step", -1, "step is -1, no whole number from 0 to 9223372036854775807"),
    ("step", 10**25, "step is 10000000000000000000000000, no whole number"),
    ("generation", -1, "generation is -1, no whole number"),
    ("generation", "2", "generation is '2'"),
    ("step", HUGE, "step is a number of 13288 bits, no whole number"),
    ("step", 1e400, "step is inf"),
    ("step", 7.0, "step is 7.0"),
    ("step", True, "step is True"),
    ("step", "7", "step is '7'"),
    ("mesh/dp", 0, "mesh.dp is 0, no whole number from 1"),
    ("mesh", [1], "mesh is list"),
    ("state", None, "state is None"),
    ("config", 3, "config is 3"),
    ("libraries/torch", "2\x00", "libraries.torch is '2\\x00'"),
    ("more", 1, "the manifest has unknown keys 'more'"),
    ("state", ..., "the manifest lacks state"),
    ("files/f", 3, "file f is 3"),
    ("files/f/more", 1, "file f has unknown keys 'more'"),
    ("files/f/bytes", -1, "file f: bytes is -1"),
    ("files/f/header", "x", "file f: header is 'x', no checksum of 16 digits"),
    ("files/a\x00b", {"bytes": 1, "header": "0" * 16}, "files outside its folder: 'a\\x00b'"),
    ("files/..", {"bytes": 1, "header": "0" * 16}, "files outside its folder: '..'"),
    ("files/a\\b", {"bytes": 1, "header": "0" * 16}, "files outside its folder: 'a\\\\b'"),
    ("files/manifest.json", {}, "files outside its folder: 'manifest.json'"),
    ("records/x\x1b[31m", {}, "'x\\x1b[31m' is no name of a record"),
    ("records/x/more", {}, "x has unknown keys 'more'"),
    ("records/x/dtype", "float31", "x: dtype 'float31' is none of float64, float32"),
    ("records/x/dtype", "float64", "x: a piece of shape [2, 3] does not have 24 bytes"),
    ("records/x/dtype", ["float32"], "x: dtype list is none of"),
    ("records/x/shape", [HUGE, 3], "x: shape is a number of 13288 bits"),
    ("records/x/shape", [2**62, 2**62], "x: shape list has more than 9223372036854775807 elements"),
    ("records/x/shape", 12, "x: shape is 12"),
    ("records/x/shape", [4, 4], "x: 4 of the 16 elements of shape [4, 4] were given by no rank"),
    ("records/x/pieces", {}, "x: pieces is dict"),
    (PIECE, 1, "a piece of x is 1"),
    (f"{PIECE}/file", "g", "x is in unlisted 'g'"),
    (f"{PIECE}/file", ["f"], "x is in unlisted list"),
    (f"{PIECE}/key", "\x00", "x: key is '\\x00'"),
    (f"{PIECE}/start", [-2, 0], "x: start of a piece is -2"),
    (f"{PIECE}/start", [1, 0], "hold the same elements"),
    (f"{PIECE}/start", [3, 0], "is not within shape [4, 3]"),
    (f"{PIECE}/start", [2], "is not within shape [4, 3]"),
    (f"{PIECE}/bytes", 20, "x: a piece of shape [2, 3] does not have 20 bytes"),
    (f"{PIECE}/offset", 125, "x: bytes 125 to 149 are beyond the end of f"),
    (f"{PIECE}/offset", -1, "x: offset is -1"),
    (f"{PIECE}/checksum", None, "x: checksum is None, no checksum of 16 digits"),
]


@pytest.mark.parametrize(("path", "value", "said"), FORGED, ids=[f"{p}-{s}" for p, _, s in FORGED])
def test_what_no_manifest_can_say_is_refused(path, value, said):
    text = changed(path, value)
    with pytest.raises(ValueError) as error:
        Manifest.from_json(text)
    assert str(error.value).startswith("manifest.json is damaged: ") and said in str(error.value)


def test_pieces_that_overlap_and_leave_a_hole_are_refused():
    data = manifest()
    data["records"]["x"]["pieces"][1]["start"] = [0, 0]  # as many elements as the record has
    with pytest.raises(ValueError, match="hold the same elements; the ranks' layouts"):
        Manifest.from_json(sealed(data))


def test_numbers_and_nesting_without_end_are_refused():
    text = sealed(manifest())
    with pytest.raises(ValueError, match="manifest.json is damaged: its JSON is nested too deeply"):
        Manifest.from_json(text.replace('"state": {}', '"state": ' + "[" * 10**5 + "]" * 10**5))
    with pytest.raises(ValueError, match="manifest.json is not JSON: Exceeds the limit"):
        Manifest.from_json(text.replace('"step": 7', '"step": ' + "7" * 10**5))


def test_a_manifest_of_absurd_length_is_not_read(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(LONGEST_MANIFEST + 1)
    assert defect(folder) == (
        f"manifest.json is damaged: it has {LONGEST_MANIFEST + 1} bytes, more than a manifest has"
    )


def test_the_dtypes_are_those_that_are_written():
    assert {str(d).removeprefix("torch."): d.itemsize for d in CODES} == WIDTHS


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ({"version": 1}, "too old, not damaged: .* version 1, but .* reads versions 2 to 3: ins"),
        ({"version": 4, "min_reader": 4}, "too new, not damaged: .*: install a newer release"),
        ({"version": 4, "min_reader": ...}, "one that reads version 4"),
    ],
)
def test_another_format_is_no_damage(version, said):
    data = {key: value for key, value in (manifest() | version).items() if value is not ...}
    with pytest.raises(UnknownVersion, match=said):
        Manifest.from_json(sealed(data))


@pytest.mark.parametrize("version", ["2", None, 0, 2.0, True])
def test_a_version_is_a_number(version):
    with pytest.raises(ValueError, match="manifest.json is damaged: its version is"):
        Manifest.from_json(changed("version", version))


def test_a_newer_format_that_older_readers_understand_is_read():
    data = manifest() | {"version": 4, "new": 1}
    data["files"]["f"]["new"] = data["records"]["x"]["new"] = 1
    data["records"]["x"]["pieces"][0]["new"] = 1
    assert Manifest.from_json(sealed(data)) == Manifest.from_json(sealed(manifest()))


@pytest.mark.parametrize("name", ["version-2", "version-2-min-reader", "version-3"])
def test_every_format_since_version_2_is_read(name, tmp_path):
    unpack(name, tmp_path)
    mesh, want = Mesh.connect(), tensors()
    values = {
        name: (torch.zeros_like(value), TensorLayout(name, tuple(value.shape)))
        for name, value in want.items()
    }
    load(tmp_path, values, mesh)
    assert all(torch.equal(values[name][0], value) for name, value in want.items())
    assert read_manifest(tmp_path).step == 7 and read_manifest(tmp_path).state == STATE


def test_the_first_format_is_named(tmp_path):
    folder = unpack("version-1", tmp_path)
    said = "manifest.json has format version 1, but this kenotron-ckpt reads versions 2 to 3: inst"
    assert said in str(defect(folder))


def test_what_is_written_says_who_can_read_it():
    text = Manifest.from_json(sealed(manifest())).to_json()
    assert json.loads(text)["min_reader"] == 2
