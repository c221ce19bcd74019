"""One writer by an owner file: leftovers, several that want one, full disks, symbolic links."""

import errno
import json
import multiprocessing
import os
import threading
import time

import pytest

from kenotron_command import OwnerFile

OWNER = "writer.owner"
FORK = multiprocessing.get_context("fork")
FAST = {"beat": 0.05, "patience": 0.8, "settle": 0.3}


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


def test_a_process_that_waits_gets_it_when_the_owner_has_ended(tmp_path):
    path = tmp_path / OWNER
    process = held(path, patience=20)
    began = time.monotonic()
    threading.Timer(1.0, process.kill).start()
    OwnerFile(path, tmp_path / "x", **FAST, wait=True).release()
    assert 0.9 < time.monotonic() - began < 15 and not path.exists()


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
    with pytest.warns(UserWarning, match="was taken by another run.*two runs may write there"):
        path.write_text('{"id": "other"}')
        time.sleep(0.5)
    owner.release()
    assert path.exists()  # it is the other one's


def test_a_full_disk_leaves_no_empty_owner_file(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        OwnerFile(tmp_path / OWNER)
    assert list(tmp_path.iterdir()) == []


def test_no_symbolic_link_is_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / OWNER).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="ymbolic link") as error:
        OwnerFile(tmp_path / OWNER)
    assert error.value.errno == errno.ELOOP
    assert (tmp_path / "precious").read_text() == "mine"
