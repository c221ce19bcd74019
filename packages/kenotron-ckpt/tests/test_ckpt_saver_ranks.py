"""Savers of several ranks: one that fails, declines or dies never leaves the others waiting."""

import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from ckpt_checks import CPU, View, begin, vectors, what_is_there, whole
from ckpt_kills import put, put_together, state_of

import kenotron_ckpt.save_job
import kenotron_ckpt.saver
import kenotron_ckpt.snapshot_files
import kenotron_dist
from kenotron_ckpt import Saver, load, store_at
from kenotron_ckpt.host_buffer import HostBuffer
from kenotron_ckpt.save_job import SaveJob
from kenotron_ckpt.share import plan_share
from kenotron_ckpt.snapshot import Snapshot
from kenotron_dist import Mesh, MeshConfig, RankError, StoreMessages, all_reduce, spawn
from kenotron_dist.placement import TensorLayout


def heard(saver):
    """What the saver says of its saves until now, with warnings apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saver.finish()
    return [(report.step, report.failure) for report in saver.reports()]


def fail_in_a_row(mesh, folder):
    """Five times there is no folder, and nothing but the saves keeps the ranks in step."""
    real = kenotron_ckpt.save_job.prepare

    def prepare(step_folder):
        if int(step_folder.name) < 5:
            raise OSError(f"no {step_folder.name}")
        return real(step_folder)

    kenotron_ckpt.save_job.prepare = prepare
    with Saver(folder, mesh) as saver, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            begin(saver, step, 1)
        return heard(saver)


def test_failures_in_a_row_are_heard_by_all(tmp_path):
    due = [(step, f"no {step}" if step < 5 else "") for step in range(6)]
    assert spawn(fail_in_a_row, tmp_path, dp=3) == [due] * 3
    assert what_is_there(tmp_path) == (5, 1)


def decline(mesh, folder, who):
    """The ranks in ``who`` come with tensors that contradict their layouts."""
    said = ""
    with Saver(folder, mesh) as saver:
        bad = {"x": (torch.zeros(3), TensorLayout("x", (4,)))}
        try:
            saver.save(10, bad if mesh.rank in who else state_of(mesh, 1), {"factor": 1})
        except ValueError as error:
            said = str(error)
        found = heard(saver)
        begin(saver, 20, 2)
        return said, found + heard(saver)


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_the_others_hear_that_a_rank_declined(tmp_path, who):
    found = spawn(decline, tmp_path, who, tp=2)
    sentence = "x: the local tensor has shape [3], its layout leaves [4] of [4] on a rank"
    for rank, (said, reports) in enumerate(found):
        if rank in who:
            assert (said, reports) == (sentence, [(20, "")])
        else:
            assert (said, reports) == ("", [(10, f"rank {who[0]}: {sentence}"), (20, "")])
    assert not (tmp_path / "10").exists()
    whole(tmp_path, 20, 2)


def train_until_one_dies(mesh, folder):
    """Rank 1 is killed in the background of a training whose ranks talk all the time."""
    kenotron_ckpt.saver._PATIENCE = 0.5
    real = kenotron_ckpt.snapshot_files.write_part

    def write(*arguments):
        if mesh.rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    kenotron_ckpt.snapshot_files.write_part = write
    with Saver(folder, mesh) as saver:
        begin(saver, 20, 2)
        while True:
            all_reduce(torch.ones(3), mesh.world)
            saver.wait()


def test_a_rank_that_dies_in_the_background_ends_all_within_seconds(tmp_path):
    spawn(put_together, tmp_path, 10, 1, {}, dp=3)
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 1: killed: died of SIGKILL"):
        spawn(train_until_one_dies, tmp_path, dp=3)
    assert time.monotonic() - begun < 20
    assert what_is_there(tmp_path) == (10, 1)
    put(tmp_path, 20, 3)
    whole(tmp_path, 20, 3)


def job_of(mesh, step_folder, notes):
    plan = plan_share(vectors(2), mesh, 1000)
    arena = HostBuffer()
    arena.fit(plan.parts, 10**6, pin=False)
    return SaveJob(
        number=1,
        step_folder=store_at(step_folder),
        mesh=mesh,
        notes=notes,
        plan=plan,
        snapshot=Snapshot(plan.parts, arena, CPU),
        state={},
        rank_state=None,
        config_text=None,
        threads=1,
        verify=False,
        after=lambda _: ([], ""),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_nobody_waits_for_any_longer_ends(tmp_path, rank):
    """The other rank of the two is gone, and this one leaves."""
    job = job_of(
        View(MeshConfig(dp=2), rank, CPU), tmp_path / "10", StoreMessages(Mesh.connect(), "x")
    )
    thread = threading.Thread(target=job.run)
    thread.start()
    assert not job.done.wait(0.2)
    job.cancelled.set()
    thread.join(10)
    assert not thread.is_alive()
    lost = "rank 1: the wait for share/1 was given up" if rank == 0 else "the wait for"
    assert job.failure.startswith(lost)
    assert not (tmp_path / "10").exists()


class GoneNotes(StoreMessages):
    """A store whose host has died."""

    def post(self, key, value):
        raise RuntimeError("the store is gone")


def test_a_store_that_is_gone_is_a_failure(tmp_path):
    job = job_of(View(MeshConfig(dp=2), 0, CPU), tmp_path / "10", GoneNotes(Mesh.connect(), "y"))
    job.run()
    assert (job.failure, job.done.is_set()) == ("the store is gone", True)
    job.snapshot.wait()


def save_own(mesh, folder):
    """Two savers on two folders, in turns; every rank has something of its own to save."""
    with Saver(folder / "a", mesh) as one, Saver(folder / "b", mesh, keep=1) as other:
        for step in (10, 20):
            for saver in (one, other):
                state = {"factor": step}
                saver.save(step, state_of(mesh, step), state, rank_state={"seed": mesh.rank})
            one.wait()
            other.wait()
        return heard(one) + heard(other)


def load_own(mesh, folder):
    wanted = state_of(mesh, 1, blank=True)
    return load(folder, wanted, mesh).rank_state


def test_two_savers_of_a_run_do_not_mix_and_ranks_get_back_their_own(tmp_path):
    sizes = {"dp": 2, "tp": 2}
    found = spawn(save_own, tmp_path, **sizes)
    assert found == [[(10, ""), (20, "")] * 2] * 4
    assert what_is_there(tmp_path / "a" / "10") == (10, 10)
    assert what_is_there(tmp_path / "a") == what_is_there(tmp_path / "b") == (20, 20)
    assert not (tmp_path / "b" / "10").exists()
    assert spawn(load_own, tmp_path / "a", **sizes) == [{"seed": rank} for rank in range(4)]
    assert spawn(load_own, tmp_path / "a", dp=4) == [None] * 4


def take_the_same(mesh, folder):
    with Saver(folder, mesh):
        try:
            Saver(folder, mesh)
        except ValueError as error:
            return str(error)


def test_a_second_writer_is_refused_on_all_ranks(tmp_path):
    first, second = spawn(take_the_same, tmp_path, dp=2)
    assert first == second
    assert f"{tmp_path} is being written by another run" in first


def keys_at(default, part):
    """All keys in the store that contain ``part``, as a stranger at its port lists them."""
    while hasattr(default, "underlying_store"):
        default = default.underlying_store
    return default, [key for key in default.list_keys() if part in key]


def under_attack(mesh, folder, lost):
    """Save while rank 1 overwrites and erases the notes of savers, as a stranger does.

    Each rank's saves; ``lost``: rank 1 never sees rank 0's first note, only the stranger's.
    """
    kenotron_dist.store_messages._REPAIR_SECONDS = 0.05
    kenotron_dist.signed_store.LOST_SECONDS = 0.5
    real, began = kenotron_ckpt.save_job.prepare, threading.Event()

    def prepare(step_folder):
        began.wait(20)  # until the notes of rank 1 are destroyed
        return real(step_folder)

    kenotron_ckpt.save_job.prepare = prepare
    default = dist.distributed_c10d._get_default_store()
    with Saver(folder, mesh) as saver, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if lost and mesh.rank == 1:
            signed, find = saver._thread.notes._store, saver._thread.notes._store.find
            signed.find = lambda key: signed._open(key, b"x") if key == "1/folder" else find(key)
        begin(saver, 1, 1)
        if mesh.rank == 1:
            saver._thread.notes.post("0/outcome", "old")
            store, keys = keys_at(default, "kenotron-notes/save")
            for number, key in enumerate(keys):
                store.set(key, "x") if number % 2 else store.delete_key(key)
        all_reduce(torch.ones(1), mesh.world)
        began.set()
        first = heard(saver)
        begin(saver, 2, 2)
        return first + heard(saver)


@pytest.mark.parametrize("lost", [False, True])
def test_a_stranger_at_the_store_neither_hangs_a_save_nor_takes_the_next(tmp_path, lost):
    one, other = spawn(under_attack, tmp_path, lost, dp=2)
    (first, failure), second = one
    assert one == other and (first, second) == (1, (2, ""))
    words = "rank 1: message kenotron-notes/save/1/1/folder in the store is not signed"
    assert failure.startswith(words) if lost else failure == ""
    whole(tmp_path, 2, 2)
