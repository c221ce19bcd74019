"""One writer to a folder, also where locks do not work; symbolic links are not followed."""

import errno
import fcntl
import json
import multiprocessing
import os
import time

import pytest
from ckpt_checks import what_is_there
from ckpt_kills import state_of

from kenotron_ckpt import Saver
from kenotron_ckpt.lock import LOCK, OWNER, FolderLock
from kenotron_ckpt.owner_file import OwnerFile
from kenotron_dist import Mesh

FORK = multiprocessing.get_context("fork")
FAST = {"beat": 0.05, "patience": 0.8, "settle": 0.3}


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EACCES, errno.EOPNOTSUPP])
def no_locks(request, monkeypatch):
    """A file system on which flock fails."""

    def flock(handle, how):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)
    return os.strerror(request.param)


def test_without_locks_there_is_a_warning_and_an_owner_file(tmp_path, no_locks):
    with pytest.warns(
        UserWarning, match=f"writer.lock: locks do not work .*{no_locks}.*owner"
    ) as w:
        lock = FolderLock(tmp_path)
    assert len(w) == 1
    owner = json.loads((tmp_path / OWNER).read_text())
    assert owner["process"] == os.getpid()
    with (
        pytest.warns(UserWarning),
        pytest.raises(
            ValueError,
            match=rf"another run \(process "
            rf"{os.getpid()} on ",
        ),
    ):
        FolderLock(tmp_path)
    lock.release()
    assert not (tmp_path / OWNER).exists()
    lock.release()


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
def test_a_saver_without_locks_saves(tmp_path, no_locks):
    mesh = Mesh.connect()
    with pytest.warns(UserWarning, match="locks do not work"), Saver(tmp_path, mesh) as saver:
        saver.save(10, state_of(mesh, 1), {"factor": 1}, "factor: 1\n")
    assert what_is_there(tmp_path) == (10, 1) and not (tmp_path / OWNER).exists()


def hold(path, ready, options):
    OwnerFile(path, **options)
    ready.set()
    time.sleep(60)


def compete(path, start, results, options):
    start.wait()
    try:
        owner = OwnerFile(path, **options)
    except ValueError as error:
        results.put(str(error))
        return
    results.put("")
    time.sleep(2)
    owner.release()


def held(path, **changes):
    """A process that owns a path."""
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(path, ready, FAST | changes), daemon=True)
    process.start()
    assert ready.wait(20)
    return process


def test_an_owner_that_beats_is_waited_for_no_longer_than_a_beat(tmp_path):
    path = tmp_path / OWNER
    process = held(path)
    began = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"is being written by another run \(process {process.pid}"
    ):
        OwnerFile(path, **FAST | {"patience": 20})
    assert time.monotonic() - began < 10
    process.kill()
    process.join()
    began = time.monotonic()
    OwnerFile(path, **FAST | {"patience": 20}).release()  # on this machine it is known to be dead
    assert time.monotonic() - began < 10 and not path.exists()


def test_a_leftover_of_another_machine_goes_after_a_while(tmp_path):
    path = tmp_path / OWNER
    process = held(path)
    process.kill()
    process.join()
    left = json.loads(path.read_text()) | {"machine": "another", "host": "far"}
    path.write_text(json.dumps(left))
    began = time.monotonic()
    owner = OwnerFile(path, **FAST)
    assert time.monotonic() - began > FAST["patience"]
    assert json.loads(path.read_text())["process"] == os.getpid()
    owner.release()


@pytest.mark.parametrize("leftover", ["", "{}", '{"id": "x", "beats": "1"}', "[1]"])
def test_of_several_that_want_a_leftover_one_gets_it(tmp_path, leftover):
    path = tmp_path / OWNER
    path.write_text(leftover)
    start, results = FORK.Event(), FORK.Queue()
    arguments = (path, start, results, FAST)
    processes = [FORK.Process(target=compete, args=arguments, daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    found = [results.get(timeout=30) for _ in processes]
    assert found.count("") == 1, found
    for process in processes:
        process.join()
    assert not path.exists() and not list(tmp_path.glob("*.tmp"))


def test_an_owner_that_was_thought_dead_says_so(tmp_path):
    path = tmp_path / OWNER
    owner = OwnerFile(path, **FAST)
    with pytest.warns(UserWarning, match="was taken by another run.*two runs may write"):
        path.write_text('{"id": "other"}')
        time.sleep(0.5)
    owner.release()
    assert path.exists()  # it is the other one's


@pytest.mark.parametrize("name", [LOCK, OWNER])
def test_no_symbolic_link_is_followed(tmp_path, name, monkeypatch):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="ymbolic link") as error:
        FolderLock(tmp_path / "run") if name == LOCK else OwnerFile(tmp_path / "run" / name)
    assert error.value.errno == errno.ELOOP
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_full_disk_leaves_no_empty_owner_file(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        OwnerFile(tmp_path / OWNER)
    assert list(tmp_path.iterdir()) == []
