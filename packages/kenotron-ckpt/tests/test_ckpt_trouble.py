"""Disks that fail while a save is written: a clear word, nothing lost, and training goes on."""

import contextlib
import errno
import os
import subprocess
import warnings
from pathlib import Path

import pytest
from ckpt_checks import begin, what_is_there, whole
from ckpt_kills import put, put_together, state_of

from kenotron_ckpt import (
    SaveFailed,
    Saver,
    latest_step,
    open_checkpoint,
)
from kenotron_dist import Mesh, spawn


def no_space(patch, folder):
    """Half of a write succeeds, then none."""
    real, room = os.write, [100]

    def write(handle, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(handle, data[: room[0]])
        room[0] -= done
        return done

    patch.setattr(os, "write", write)


def refuse(patch, name, number, matches=lambda path: True):
    """A method of Path fails on paths that match."""
    real = getattr(Path, name)

    def method(path, *args, **options):
        if matches(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    patch.setattr(Path, name, method)


def no_space_for_the_manifest(patch, folder):
    refuse(patch, "open", errno.ENOSPC, lambda path: path.name == "manifest.json.tmp")


def no_permission(patch, folder):
    refuse(patch, "open", errno.EACCES, lambda path: path.suffix == ".safetensors")


def read_only(patch, folder):
    refuse(patch, "mkdir", errno.EROFS, lambda path: path.name == "20")


def disk_error(patch, folder):
    def fsync(handle):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, "fsync", fsync)


def lying_disk(patch, folder):
    """What reaches the disk is not what was written."""
    real = os.write
    patch.setattr(os, "write", lambda handle, data: real(handle, bytes(b ^ 4 for b in data)))


def file_in_the_way(patch, folder):
    (folder / "20").write_text("mine")


TROUBLES = [
    (no_space, r"No space left on device"),
    (no_space_for_the_manifest, r"No space left on device: '.*/20/manifest.json.tmp'"),
    (no_permission, r"Permission denied: '.*/20/shard-00000-of-00001.safetensors'"),
    (read_only, r"Read-only file system: '.*/20'"),
    (disk_error, r"Input/output error"),
    (lying_disk, r"20/shard-\S+ does not read back as it was written: shard-\S+: its header is n"),
    (file_in_the_way, r"File exists: '.*/20'"),
]
troubles = pytest.mark.parametrize(
    ("trouble", "sentence"), TROUBLES, ids=[trouble.__name__ for trouble, _ in TROUBLES]
)


def recover(folder):
    """The trouble is gone: the same save succeeds, and nothing is left of the one that failed."""
    assert what_is_there(folder) == (10, 1)
    if (folder / "20").is_file():
        assert (folder / "20").read_text() == "mine"
        (folder / "20").unlink()
    assert not (folder / "20").exists()


@troubles
def test_a_save_in_trouble_says_so_and_loses_nothing(tmp_path, trouble, sentence):
    put(tmp_path, 10, 1)
    with pytest.MonkeyPatch.context() as patch:
        trouble(patch, tmp_path)
        with pytest.raises(OSError, match=sentence):
            put(tmp_path, 20, 2, verify=True)
    recover(tmp_path)
    put(tmp_path, 20, 3)
    whole(tmp_path, 20, 3)


@troubles
def test_a_saver_in_trouble_warns_and_goes_on(tmp_path, trouble, sentence):
    put(tmp_path, 10, 1)
    with Saver(tmp_path, Mesh.connect(), verify=True) as saver:
        with pytest.MonkeyPatch.context() as patch:
            trouble(patch, tmp_path)
            with pytest.warns(UserWarning, match=rf"step 20 was not saved: .*{sentence}"):
                begin(saver, 20, 2)
                saver.finish()
        (report,) = saver.reports()
        assert report.failure
        assert report.step == 20
        recover(tmp_path)
        begin(saver, 20, 3)
        saver.finish()
        assert [report.failure for report in saver.reports()] == [""]
    whole(tmp_path, 20, 3)


@troubles
def test_a_saver_in_trouble_raises_when_asked_to(tmp_path, trouble, sentence):
    put(tmp_path, 10, 1)
    with Saver(tmp_path, Mesh.connect(), verify=True, on_failure="raise") as saver:
        with pytest.MonkeyPatch.context() as patch:
            trouble(patch, tmp_path)
            saver.save(20, state_of(saver.mesh, 2), {"factor": 2})
            with pytest.raises(SaveFailed, match=rf"step 20 was not saved: .*{sentence}"):
                saver.finish()
        recover(tmp_path)
        begin(saver, 20, 3)  # it is raised once
    whole(tmp_path, 20, 3)


def fill_the_disk_of_one(mesh, folder, on_failure):
    """Rank 1 cannot write for a while; what every rank hears, and when."""
    said = []
    with (
        Saver(folder, mesh, on_failure=on_failure) as saver,
        warnings.catch_warnings(record=True) as caught,
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("always")
        if mesh.rank == 1:
            no_space(patch, folder)
        begin(saver, 20, 2)
        try:
            begin(saver, 30, 2)
        except SaveFailed as error:
            said.append(str(error))
        with contextlib.suppress(SaveFailed):
            saver.finish()
        patch.undo()
        begin(saver, 40, 3)
    said += [str(each.message) for each in caught]
    return said, [bool(report.failure) for report in saver.reports()]


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_every_rank_hears_of_the_one_that_could_not_write(tmp_path, on_failure):
    spawn(put_together, tmp_path, 10, 1, {}, dp=2, tp=2)
    found = spawn(fill_the_disk_of_one, tmp_path, on_failure, dp=2, tp=2)
    failed = "was not saved: rank 1: [Errno 28] No space left on device"
    for said, outcomes in found:
        if on_failure == "raise":  # at the next save, which did not begin
            assert said == [f"step 20 {failed}"]
            assert outcomes == [True, False]
        else:
            assert said == [f"step {s} {failed}; earlier checkpoints are whole" for s in (20, 30)]
            assert outcomes == [True, True, False]
    assert not (tmp_path / "20").exists()
    assert not (tmp_path / "30").exists()
    assert what_is_there(tmp_path) == (40, 3)
    assert what_is_there(tmp_path / "10") == (10, 1)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB, and how to make it read-only; skipped where one may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_or_read_only_in_earnest(tiny_disk):
    def remount(mode):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(tiny_disk)], check=True)

    put(tiny_disk, 10, 1)
    with Saver(tiny_disk, Mesh.connect()) as saver:
        filler = tiny_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        with pytest.raises(OSError, match="No space left on device"):
            put(tiny_disk, 20, 2)
        with pytest.warns(UserWarning, match="step 20 was not saved: .*No space left on device"):
            begin(saver, 20, 2)
            saver.finish()
        recover(tiny_disk)
        filler.unlink()
        begin(saver, 20, 3)
    whole(tiny_disk, 20, 3)
    remount("ro")
    with pytest.raises(OSError, match="Read-only file system: '.*/30'"):
        put(tiny_disk, 30, 2)
    with pytest.raises(OSError, match="Read-only file system: '.*/writer.lock'"):
        Saver(tiny_disk, Mesh.connect())
    whole(tiny_disk, 20, 3)


def test_an_unreadable_manifest_is_not_taken_for_none(tmp_path):
    put(tmp_path, 10, 1)
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "read_bytes", errno.EIO, lambda path: path.name == "manifest.json")
        with pytest.raises(OSError, match="Input/output error: '.*10/manifest.json'"):
            put(tmp_path, 10, 2)
    assert what_is_there(tmp_path) == (10, 1)


def test_a_file_that_cannot_be_looked_at_is_a_fault_of_its_checkpoint(tmp_path):
    put(tmp_path, 10, 1)
    put(tmp_path, 20, 2)
    with pytest.MonkeyPatch.context() as patch:
        broken = f"{tmp_path}/20/shard-"
        refuse(patch, "stat", errno.EIO, lambda path: str(path).startswith(broken))
        assert latest_step(tmp_path) == 10
        found = open_checkpoint(tmp_path, Mesh.connect())
    assert "20: shard-00000-of-00001.safetensors cannot be read: [Err" in found.passed_over[0]
