"""One process makes a folder of tokens, also on a file system where locks do not work."""

import errno
import fcntl
import functools
import os
import threading
import time
from pathlib import Path

import pytest

from kenotron_command import OwnerFile
from kenotron_data import file_lock
from kenotron_data.file_lock import locked


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EACCES])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system on which flock fails, and a heart that beats fast."""

    def flock(handle: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)
    fast = functools.partial(OwnerFile, beat=0.05, patience=0.8, settle=0.3)
    monkeypatch.setattr(file_lock, "OwnerFile", fast)
    return os.strerror(request.param)


def test_without_locks_there_is_a_warning_and_an_owner_file(tmp_path: Path, no_locks: str) -> None:
    path, owner = tmp_path / "a/x.lock", tmp_path / "a/x.lock.owner"
    said = rf"x\.lock: locks do not work on this file system .*{no_locks}.*x\.lock\.owner"
    with pytest.warns(UserWarning, match=said) as warned, locked(path):
        assert owner.exists()
        with pytest.raises(
            ValueError,
            match=rf"x\.lock is being written by another run \(process {os.getpid()} on ",
        ):
            with locked(path, wait=False):
                pass
        assert owner.exists()
    assert len(warned) == 2
    assert not any((tmp_path / "a").iterdir())


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
@pytest.mark.filterwarnings("ignore:.*locks do not work")
def test_others_wait_for_an_owner_longer_than_for_a_leftover(tmp_path: Path, no_locks: str) -> None:
    path, held, inside = tmp_path / "x.lock", [], threading.Lock()

    def hold() -> None:
        with locked(path):
            alone = inside.acquire(blocking=False)
            time.sleep(1.0)  # longer than others wait for a leftover
            held.append(alone)
            inside.release()

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert held == [True] * 3
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
@pytest.mark.parametrize("leftover", ["", '{"id": "x"}'])
@pytest.mark.filterwarnings("ignore:.*locks do not work")
def test_of_several_that_want_a_leftover_one_gets_it(
    tmp_path: Path, no_locks: str, leftover: str
) -> None:
    path, got = tmp_path / "x.lock", []
    path.with_name("x.lock.owner").write_text(leftover)

    def want() -> None:
        try:
            with locked(path, wait=False):
                time.sleep(2.0)
                got.append(True)
        except ValueError:
            got.append(False)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(got) == [False, False, False, True]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
def test_an_owner_that_was_thought_dead_says_so(tmp_path: Path, no_locks: str) -> None:
    owner = tmp_path / "x.lock.owner"
    with pytest.warns(UserWarning) as warned, locked(tmp_path / "x.lock"):
        owner.write_text('{"id": "another"}')
        time.sleep(0.5)
    assert "was taken by another run" in str(warned[-1].message) and len(warned) == 2
    assert owner.exists()  # it is the other one's


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
@pytest.mark.filterwarnings("ignore:.*locks do not work")
def test_no_symbolic_link_is_followed(tmp_path: Path, no_locks: str) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x.lock.owner").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="ymbolic link"), locked(tmp_path / "x.lock"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
