"""The pure functions: coverage, overlap, the manifest's text, who writes what."""

import itertools
import json
import math

import pytest
import torch
from ckpt_cases import MESHES, name_of, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from kenotron_ckpt.blocks import blocks_of, share_of
from kenotron_ckpt.coverage import check_coverage, first_missing, merge_records, overlap
from kenotron_ckpt.index import FileEntry, Manifest, Piece, Record
from kenotron_dist import MeshConfig, views_of
from kenotron_dist.boxes import local_shape
from kenotron_dist.placement import TensorLayout

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def cells(start, shape):
    return set(itertools.product(*(range(a, a + n) for a, n in zip(start, shape, strict=True))))


@st.composite
def partitions(draw):
    """A shape, and blocks that cover it exactly once: cut again and again."""
    shape = draw(SHAPES)
    blocks = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        start, extent = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        dims = [d for d, size in enumerate(extent) if size > 1]
        if not dims:
            blocks.append((start, extent))
            continue
        d = draw(st.sampled_from(dims))
        at = draw(st.integers(1, extent[d] - 1))
        blocks.append((start, (*extent[:d], at, *extent[d + 1 :])))
        moved = (*start[:d], start[d] + at, *start[d + 1 :])
        blocks.append((moved, (*extent[:d], extent[d] - at, *extent[d + 1 :])))
    return shape, draw(st.permutations(blocks))


@st.composite
def heaps(draw):
    """A shape and any blocks within it."""
    shape = draw(SHAPES)
    blocks = []
    for _ in range(draw(st.integers(0, 4))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        blocks.append(
            (start, tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))
        )
    return shape, blocks


def record(shape, blocks):
    pieces = tuple(
        Piece("f", f"x@{i}", *block, 0, 4 * math.prod(block[1]), "0" * 16)
        for i, block in enumerate(blocks)
    )
    return Record(shape, "float32", pieces)


@given(partitions())
def test_a_partition_is_covered(case):
    shape, blocks = case
    check_coverage("x", record(shape, blocks))
    assert first_missing(shape, blocks) is None


@given(heaps())
def test_coverage_is_exact(case):
    shape, blocks = case
    counted = [cell for block in blocks for cell in cells(*block)]
    everything = cells((0,) * len(shape), shape)
    missing = sorted(everything - set(counted))
    assert first_missing(shape, blocks) == (missing[0] if missing else None)
    if missing or len(counted) != len(everything):
        with pytest.raises(ValueError, match="^x: "):
            check_coverage("x", record(shape, blocks))
    else:
        check_coverage("x", record(shape, blocks))


@given(heaps())
def test_overlap_is_the_intersection(case):
    for a, b in itertools.combinations(case[1], 2):
        shared = overlap(a, b)
        assert (cells(*shared) if shared else set()) == cells(*a) & cells(*b)


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        (
            [((0, 0), (4, 2)), ((2, 2), (2, 1))],
            r"x: 2 of the 12 elements of shape \[4, 3\] were given by no rank, "
            r"first at index \[0, 2\]",
        ),
        ([], r"x: 12 of the 12 elements of shape \[4, 3\] were given by no rank"),
        (
            [((0, 0), (4, 2)), ((3, 1), (1, 2))],
            r"x: pieces f:x@0 \[4, 2\] and f:x@1 \[1, 2\] hold the same elements",
        ),
        ([((0, 0), (5, 3))], r"x: piece f:x@0 \[5, 3\] is not within shape \[4, 3\]"),
        ([((0, -1), (4, 3))], r"x: piece f:x@0 \[4, 3\] is not within shape \[4, 3\]"),
        ([((0,), (4,))], r"x: piece f:x@0 \[4\] is not within shape \[4, 3\]"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(blocks, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_coverage("x", record((4, 3), blocks))


def test_twelve_thousand_pieces_are_checked_quickly():
    blocks = [((r, 16 * c), (1, 16)) for r in range(1500) for c in range(8)]
    check_coverage("x", record((1500, 128), blocks))


def test_ranks_that_disagree_about_a_record_are_told():
    a, b = Record((2,), "float32"), Record((3,), "float32")
    with pytest.raises(ValueError, match=r"x: rank 1 has float32 \[3\], a lower rank has float32"):
        merge_records([{"x": a}, {"x": b}])


@settings(deadline=None)
@given(partitions(), st.dictionaries(st.text(max_size=3), st.integers()))
def test_the_manifest_survives_its_text(case, state):
    manifest = Manifest(
        step=7,
        mesh={"tp": 2},
        records={"é.weight": record(*case)},
        files={"f": FileEntry(4000, "0" * 16)},
        state=state,
        config="a: 1\n",
        libraries={"torch": "2"},
    )
    assert Manifest.from_json(manifest.to_json()) == manifest


def sealed(data):
    """The text of a manifest of these values, with the checksum that it should have."""
    body = json.dumps({key: value for key, value in data.items() if key != "checksum"})[:-1]
    return f'{body},\n"checksum": "{xxh3_64_hexdigest(body.encode())}"\n}}\n'


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "manifest.json is not a 'kenotron-checkpoint'"),
        ({"version": 1}, "format version 1, but this kenotron-ckpt reads versions 2 to 3: install"),
        ({"files": {}}, "manifest.json is damaged: x is in unlisted 'f'"),
        ({"files": {"f": {"bytes": 1}}}, "manifest.json is damaged: file f lacks header"),
        ({"records": {"x": {}}}, "manifest.json is damaged: x lacks dtype, pieces, shape"),
        (
            {"files": {"../f": {"bytes": 1, "header": ""}}, "records": {}},
            "manifest.json is damaged: files outside its folder",
        ),
    ],
)
def test_a_bad_manifest_is_named(change, sentence):
    good = Manifest(
        step=1, mesh={}, records={"x": record((), [((), ())])}, files={"f": FileEntry(4, "0" * 16)}
    )
    with pytest.raises(ValueError, match=sentence):
        Manifest.from_json(sealed(json.loads(good.to_json()) | change))


def test_every_changed_byte_of_a_manifest_is_noticed():
    good = Manifest(
        step=1,
        mesh={"tp": 2},
        records={"x": record((3,), [((0,), (3,))])},
        files={"f": FileEntry(12, "0" * 16)},
        state={"lr": 0.125},
        rank_states=[{"seed": 1}, None],
    )
    data = good.to_json().encode()
    for place in range(len(data)):
        for bit in (0, 3, 6):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                found = Manifest.from_json(damaged.decode(errors="surrogateescape"))
            except ValueError:
                continue
            assert found == good  # the blanks after the checksum
            assert place >= len(data) - 3


def test_text_that_is_not_json_is_named():
    with pytest.raises(ValueError, match="manifest.json is not JSON: "):
        Manifest.from_json('{"format": "keno')


@pytest.mark.parametrize("sizes", MESHES, ids=name_of)
def test_each_element_has_one_writer_and_the_work_is_spread(sizes):
    config = MeshConfig(**sizes)
    sizes = config.sizes
    written: dict[str, list] = {}
    for rank in range(math.prod(sizes.values())):
        view = views_of(config, rank)
        tensors = {
            name: (torch.zeros(local_shape(layout, view(layout))), layout)
            for name, (layout, _) in parameters(sizes).items()
            if view(layout).coords["pp"] in layout.stages
        }
        share = share_of(blocks_of(tensors, view), view)
        assert share or sizes["tp"] == 8
        for block in share:
            written.setdefault(block.name, []).append((block.box.start, block.box.shape))
    for name, (layout, _) in parameters(sizes).items():
        check_coverage(name, record(layout.shape, written.get(name, [])))


def test_replicated_blocks_are_dealt_out_by_size():
    layouts = [TensorLayout(f"layers.{i}", (10 + i % 3, 8)) for i in range(40)]
    tensors = {p.name: (torch.zeros(p.shape), p) for p in layouts}
    loads = []
    for rank in range(4):
        view = views_of(MeshConfig(dp=4), rank)
        share = share_of(blocks_of(tensors, view), view)
        loads.append(sum(block.nbytes for block in share))
    assert max(loads) < 1.05 * min(loads)
