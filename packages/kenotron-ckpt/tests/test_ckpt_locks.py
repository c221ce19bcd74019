"""One writer to a folder, also where locks do not work; symbolic links are not followed."""

import errno
import fcntl
import json
import multiprocessing
import os

import pytest
from ckpt_checks import what_is_there
from ckpt_kills import state_of

from kenotron_ckpt import Saver
from kenotron_ckpt.lock import LOCK, OWNER, FolderLock
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


def test_no_symbolic_link_is_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="ymbolic link") as error:
        FolderLock(tmp_path / "run")
    assert error.value.errno == errno.ELOOP
    assert (tmp_path / "precious").read_text() == "mine"
