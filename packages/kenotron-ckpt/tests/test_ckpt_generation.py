"""A start that a later one has superseded saves nothing; saves of two starts are never mixed."""

import json
import shutil
import time

import pytest
import torch
from ckpt_kills import MANY, state_of

from kenotron_ckpt import (
    LOCK,
    FolderLock,
    FsspecStore,
    NoCheckpoint,
    Saver,
    Uploader,
    latest_step,
    load,
    read_manifest,
    verify_files,
)
from kenotron_dist import Mesh

BOTH = pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])


def start(folder, **options):
    """A start that has lost the lock that it took, as on a file system that forgets locks."""
    saver = Saver(folder, Mesh.connect(), on_failure="report", **options)
    saver._lock.release()
    return saver


def put(saver, step, factor):
    saver.save(step, state_of(saver.mesh, factor), {"factor": factor})
    saver.finish()


def refusal(call, *args):
    """The error of a save or a check; empty where there was none."""
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


def test_each_start_has_a_higher_number(tmp_path):
    for number in (1, 2, 3):
        with Saver(tmp_path, Mesh.connect()) as saver:
            put(saver, number, 1)
        assert read_manifest(tmp_path / str(number)).generation == number
    (tmp_path / LOCK).unlink()  # a copy of the folder without it
    lock = FolderLock(tmp_path)
    assert lock.generation.number == 4
    lock.release()


@BOTH
def test_an_older_start_saves_nothing(tmp_path, background):
    old = start(tmp_path, background=background)
    put(old, 1, 1)
    new = start(tmp_path, background=background)
    put(new, 2, 2)
    said = refusal(put, old, 3, 3)
    assert (
        "taken over by a later start" in said and "generation 2; this one is generation 1" in said
    )
    assert latest_step(tmp_path) == 2 and not (tmp_path / "3").exists()
    said = refusal(put, old, 2, 3)  # the step of the newer one stays as it is
    assert "nothing was saved, and this start must end" in said
    assert read_manifest(tmp_path / "2").state == {"factor": 2} and not verify_files(tmp_path / "2")
    put(new, 4, 4)
    for each in (old, new):
        each.close()


@BOTH
def test_copies_elsewhere_are_of_the_same_start(tmp_path, background):
    old = start(tmp_path / "run", background=background)
    copies = start(tmp_path / "copies", background=background, generation=old.generation)
    put(copies, 1, 1)
    assert read_manifest(tmp_path / "copies").generation == 1
    new = [start(tmp_path / "run") for _ in range(2)]
    with pytest.raises(ValueError, match=r"generation 3; this one is generation 1"):
        put(copies, 2, 2)
    for each in (old, copies, *new):
        each.close()


def test_two_starts_that_read_one_number_are_told_apart(tmp_path):
    first, second = (FolderLock(tmp_path / name) for name in "ab")
    shutil.copy(tmp_path / "b" / LOCK, tmp_path / "a" / LOCK)
    second.generation.check()
    assert "(generation 1; this one is generation 1)" in refusal(first.generation.check)
    (tmp_path / "b" / LOCK).write_text("")  # the disk was full when the lock was taken
    second.generation.check()
    for each in (first, second):
        each.release()


def test_saves_of_two_starts_are_never_mixed(tmp_path):
    """Each file of the one with all others of the other: every mixture is refused."""
    mesh = Mesh.connect()
    for factor, name in enumerate("ab", 1):
        with Saver(tmp_path / name, mesh, file_bytes=MANY) as saver:
            put(saver, 5, factor)
    files = sorted(read_manifest(tmp_path / "a").files)
    assert len(files) == 3 and files == sorted(read_manifest(tmp_path / "b").files)
    for name in [*files, "manifest.json"]:
        mixed = tmp_path / f"mixed-{name}"
        shutil.copytree(tmp_path / "a", mixed)
        shutil.copy(tmp_path / "b/5" / name, mixed / "5" / name)
        wanted = state_of(mesh, 1, blank=True)
        with pytest.raises(NoCheckpoint, match="no checkpoint at"):
            load(mixed, wanted, mesh)
        floating = [held for held, _ in wanted.values() if held.is_floating_point()]
        assert all(bool(torch.isnan(held).all()) for held in floating)


def test_a_changed_number_is_damage(tmp_path):
    with Saver(tmp_path, Mesh.connect()) as saver:
        put(saver, 1, 1)
    path = tmp_path / "1/manifest.json"
    assert json.loads(path.read_text())["generation"] == 1
    path.write_text(path.read_text().replace('"generation": 1', '"generation": 9'))
    with pytest.raises(ValueError, match="damaged or was edited"):
        read_manifest(tmp_path / "1")


class Host:
    """A start in a folder that no other start sees, which uploads to a URL that all do."""

    def __init__(self, folder, url):
        self.uploader = Uploader(url, tries=1)
        self.saver = start(folder, background=False, above=self.uploader.latest_start())
        self.uploader.begin(self.saver.generation)

    def put(self, step, factor):
        put(self.saver, step, factor)
        self.uploader.submit(self.saver.folder / str(step))

    def end(self):
        """Errors of the uploads."""
        return [report.error for report in self.uploader.close()]


def test_a_start_on_another_disk_supersedes_the_one_that_uploads(tmp_path):
    """A host was cut off; the run continues from the URL on another one; then the host is back."""
    url, store = f"file://{tmp_path}/store", tmp_path / "store"
    old = Host(tmp_path / "old", url)
    old.put(1, 1)
    while old.uploader.pending():
        time.sleep(0.01)
    new = Host(tmp_path / "new", url)
    assert (old.saver.generation.number, new.saver.generation.number) == (1, 2)
    new.put(2, 2)
    assert new.end() == [None]
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    for step in (1, 2, 9):  # again, in the place of a later start's, and behind it
        old.put(step, 3)
    first, *late = old.end()
    assert first is None
    assert all("generation 2; this one is generation 1" in str(error) for error in late)
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before
    found = read_manifest(url)
    assert (found.step, found.generation) == (2, 2)


def test_what_an_earlier_start_left_is_uploaded_by_the_next_one(tmp_path):
    url, folder = f"file://{tmp_path}/store", tmp_path / "run"
    put(start(folder, background=False), 4, 1)
    new = Host(folder, url)
    new.uploader.submit_all(folder, 4)
    assert new.end() == [None] and read_manifest(url).generation == 1
    (tmp_path / "store" / LOCK).unlink()  # of a URL from before there were generations
    assert new.uploader.latest_start() == 1


def test_a_start_that_is_superseded_during_an_upload_commits_nothing(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store"
    old, send = Host(tmp_path / "old", url), FsspecStore.send

    def late(self, name, *more):
        send(self, name, *more)
        monkeypatch.setattr(FsspecStore, "send", send)
        Host(tmp_path / "new", url)

    monkeypatch.setattr(FsspecStore, "send", late)
    old.put(1, 1)
    (error,) = old.end()
    assert "taken over by a later start" in str(error) and latest_step(url) is None
