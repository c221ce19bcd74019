"""A saver from its making to its end: locks, closing, errors, and nothing that piles up."""

import gc
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from ckpt_checks import begin, vectors, what_is_there, whole
from ckpt_kills import put

from kenotron_ckpt import Saver
from kenotron_ckpt.protocol import SaveMoment, listen
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout


def test_what_on_commit_raises_is_reported_and_old_ones_go_all_the_same(tmp_path):
    def tell(step_folder):
        told.append(step_folder.name)
        raise KeyError("mirror")

    told = []
    put(tmp_path, 10, 1)
    with Saver(tmp_path, Mesh.connect(), keep=1, on_commit=tell) as saver:
        with pytest.warns(UserWarning, match=r"/20 stands, but then: KeyError\('mirror'\)"):
            begin(saver, 20, 2)
            saver.finish()
        (report,) = saver.reports()
    assert (report.failure, report.follow_up, report.removed) == ("", "KeyError('mirror')", [10])
    assert told == ["20"]
    whole(tmp_path, 20, 2)


def test_closing_twice_is_harmless_and_saving_after_it_an_error(tmp_path):
    saver = Saver(tmp_path, Mesh.connect())
    begin(saver, 10, 1)
    saver.close()
    saver.close()
    with pytest.raises(RuntimeError, match=f"save of step 20: this Saver of {tmp_path} is closed"):
        saver.save(20, vectors(1), {})
    whole(tmp_path, 10, 1)


def test_an_error_of_the_training_lets_a_save_under_way_end(tmp_path, slow):
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, Mesh.connect()) as saver:
        begin(saver, 10, 1)
        1 // 0  # noqa: B018
    whole(tmp_path, 10, 1)
    with Saver(tmp_path, Mesh.connect()):
        pass  # the folder is free again


def test_a_folder_has_one_writer(tmp_path):
    mesh = Mesh.connect()
    with Saver(tmp_path / "a", mesh) as one:
        with pytest.raises(
            ValueError,
            match=rf"/a is being written by another run \(process {os.getpid()} on .*\): give each",
        ):
            Saver(tmp_path / "a", mesh)
        with Saver(tmp_path / "b", mesh) as other:
            begin(one, 10, 1)
            begin(other, 20, 2)
    whole(tmp_path / "a", 10, 1)
    whole(tmp_path / "b", 20, 2)


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    saver = Saver(tmp_path, Mesh.connect())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        child = os.fork()
    if not child:
        signal.pause()  # as a worker that loads data does
    try:
        saver.close()
        Saver(tmp_path, Mesh.connect()).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_on_a_full_disk_holds_without_a_name(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with Saver(tmp_path, Mesh.connect()), pytest.raises(ValueError, match="another run"):
        Saver(tmp_path, Mesh.connect())
    Saver(tmp_path, Mesh.connect()).close()


def test_a_run_folder_that_vanishes_is_made_again(tmp_path, slow):
    with Saver(tmp_path / "run", Mesh.connect()) as saver:
        begin(saver, 10, 1)
        saver.finish()
        shutil.rmtree(tmp_path / "run")
        begin(saver, 20, 2)
        saver.finish()
        slow.clear()
        begin(saver, 30, 3)
        while not (tmp_path / "run" / "30").exists():
            time.sleep(0.001)
        shutil.rmtree(tmp_path / "run")
        slow.set()
        with pytest.warns(UserWarning, match="step 30 was not saved: .*No such file or directory"):
            saver.finish()
        begin(saver, 40, 4)
    whole(tmp_path / "run", 40, 4)


class Stop(BaseException):
    """What no handler of Exception catches."""


def raise_at(step):
    def listener(passed):
        if passed is step:
            raise Stop

    return listen(listener)


@pytest.mark.filterwarnings("ignore:step 20 was not saved")
@pytest.mark.parametrize(
    "step", [SaveMoment.BEGUN, SaveMoment.BLOCK_WRITTEN, SaveMoment.FOLDER_SYNCED]
)
def test_whatever_is_raised_in_the_thread_nobody_hangs(tmp_path, step):
    put(tmp_path, 10, 1)
    with Saver(tmp_path, Mesh.connect(), pool_bytes=100, threads=3) as saver:
        stop = raise_at(step)
        begin(saver, 20, 2)
        saver.finish()
        stop()
        assert saver.reports()[0].failure.removeprefix("rank 0: ") == "Stop()"
        assert what_is_there(tmp_path) == (10, 1)
        begin(saver, 30, 3)
    whole(tmp_path, 30, 3)


def test_nothing_piles_up(tmp_path):
    gc.collect()
    before = threading.active_count()
    saver = Saver(tmp_path, Mesh.connect(), keep=1, threads=3, pool_bytes=500)
    for step in range(20):
        begin(saver, step, 1)
    saver.finish()
    assert len(saver._thread.notes._own) <= 2
    assert threading.active_count() == before + 1
    saver.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert saver._arena.slots == []
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["19"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": 0}, "every: 0 was given; it must be at least 1"),
        ({"pool_bytes": 0}, "pool_bytes: 0 was given; it must be at least 1"),
        ({"threads": 0}, "threads: 0 was given"),
        ({"file_bytes": 0}, "file_bytes: 0 was given"),
        ({"keep": 0}, "keep = 0 would leave no checkpoint"),
        ({"keep_every": 0}, "keep_every = 0: it is a number of steps, at least 1"),
        ({"on_failure": "weep"}, "on_failure: 'weep' was given; it is warn, report or raise"),
    ],
)
def test_options_that_make_no_sense_are_named(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Saver(tmp_path / "run", Mesh.connect(), **options)
    assert not (tmp_path / "run").exists()


def test_arguments_that_cannot_be_saved_are_refused_and_the_next_save_works(tmp_path):
    with Saver(tmp_path, Mesh.connect()) as saver:
        for arguments, sentence in [
            ((-1, vectors(1), {}), "step = -1"),
            ((1, vectors(1), {"a": {1}}), "state is not made of JSON values"),
            ((1, {"x": (torch.zeros(3), TensorLayout("x", (4,)))}, {}), "x: the local tensor has"),
        ]:
            with pytest.raises(ValueError, match=sentence):
                saver.save(*arguments)
        begin(saver, 10, 1)
    whole(tmp_path, 10, 1)
