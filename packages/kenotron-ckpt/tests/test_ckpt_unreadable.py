"""Checkpoints that are there and cannot be read: named as such, and never removed."""

import errno
import json
import os
from pathlib import Path

import pytest
from ckpt_checks import flipped, what_is_there
from ckpt_kills import put, state_of
from xxhash import xxh3_64_hexdigest

from kenotron_ckpt import Saver, has_manifests, open_checkpoint
from kenotron_ckpt.committing import sweep
from kenotron_ckpt.folder import manifest_at
from kenotron_ckpt.index import Manifest
from kenotron_ckpt.preparing import prepare
from kenotron_dist import Mesh


def of_version(step_folder, version):
    """Give a checkpoint another format version, with a valid checksum at its end."""
    path = step_folder / "manifest.json"
    data = json.loads(path.read_text())
    del data["checksum"]
    body = json.dumps(data | {"version": version, "min_reader": version})[:-1]
    path.write_text(f'{body},\n"checksum": "{xxh3_64_hexdigest(body.encode())}"\n}}\n')


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fail(patch, number, name="manifest.json"):
    """Reads of a file fail as on a lost file system."""
    for method in ("read_bytes", "stat", "open"):
        real = getattr(Path, method)

        def broken(path, *args, real=real, **options):
            if path.name.startswith(name):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **options)

        patch.setattr(Path, method, broken)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (4, r"format is too new, not damaged: .*version 4, but .* reads versions 2 to 3: .* newer"),
        (1, r"format is too old, not damaged: .*version 1, .*: install the release that wrote it"),
    ],
)
def test_another_format_version_is_told_from_damage(tmp_path, version, message):
    put(tmp_path, 10, 1)
    of_version(tmp_path / "10", version)
    with pytest.raises(ValueError, match=message):
        manifest_at(tmp_path / "10")


def test_a_changed_byte_in_the_version_is_damage(tmp_path):
    put(tmp_path, 10, 1)
    path = tmp_path / "10" / "manifest.json"
    place = path.read_bytes().index(b'"version": ') + len(b'"version": ')
    flipped(path, place, 0)
    assert json.loads(path.read_text())["version"] == 2  # another one that is read
    with pytest.raises(ValueError, match="is damaged or was edited: .* at its end$") as error:
        manifest_at(tmp_path / "10")
    assert "too new" not in str(error.value)


def test_a_version_without_any_checksum_is_judged_by_its_number():
    with pytest.raises(ValueError, match="the format is too new, not damaged"):
        Manifest.from_json('{"format": "kenotron-checkpoint", "version": 9}')


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_manifest_that_cannot_be_looked_at_counts(tmp_path, number):
    put(tmp_path, 10, 1)
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, number)
        assert has_manifests(tmp_path)
        with pytest.raises(OSError, match=os.strerror(number)):
            prepare(tmp_path / "10")
    assert what_is_there(tmp_path) == (10, 1)


def test_a_run_folder_that_cannot_be_listed_is_an_error(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, errno.ESTALE, tmp_path.name)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            has_manifests(tmp_path)


def test_only_manifests_count(tmp_path):
    assert not has_manifests(tmp_path) and not has_manifests(tmp_path / "none")
    (tmp_path / "20").mkdir()
    (tmp_path / "20" / "shard-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "30").symlink_to(tmp_path / "nowhere")
    assert not has_manifests(tmp_path)
    (tmp_path / "20" / "manifest.json").write_text("")
    assert has_manifests(tmp_path) and not has_manifests(tmp_path, [10, 30])


def test_nothing_is_swept_beside_a_manifest_that_is_not_understood(tmp_path):
    put(tmp_path, 10, 1)
    of_version(tmp_path / "10", 4)
    before = bytes_of(tmp_path / "10")
    sweep(tmp_path / "10")
    assert bytes_of(tmp_path / "10") == before


@pytest.mark.parametrize("background", [True, False])
def test_a_save_in_its_place_sets_it_aside(tmp_path, background):
    put(tmp_path, 10, 1)
    for count, name in enumerate(["20.unreadable", "20.unreadable.1"]):
        put(tmp_path, 20, 2)
        of_version(tmp_path / "20", 4)
        before = bytes_of(tmp_path / "20")
        mesh = Mesh.connect()
        assert open_checkpoint(tmp_path, mesh).folder.name == "10"
        with (
            pytest.warns(UserWarning, match=rf"(?s)20 is needed.*too new.*kept in .*/{name}$"),
            Saver(tmp_path, mesh, background=background) as saver,
        ):
            saver.save(
                20, state_of(mesh, 3 + count), {"factor": 3 + count}, f"factor: {3 + count}\n"
            )
            saver.wait()
        assert what_is_there(tmp_path) == (20, 3 + count)
        assert bytes_of(tmp_path / name) == before
