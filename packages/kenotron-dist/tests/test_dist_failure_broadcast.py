"""A rank that gives up frees those that wait for it, and they learn why."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch

from kenotron_dist import Axis, Mesh, receive, spawn
from kenotron_dist.diagnosis import FailureBroadcast


def give_up(mesh: Mesh) -> tuple[str, float]:
    """Rank 2 waits for 1, 1 for 0, and 0 gives up: it has no connection that 2 waits on."""
    axis = mesh["dp"]
    for _ in range(2):  # the second line knows nothing of the first
        distress = FailureBroadcast([axis, mesh.twin("dp"), mesh["tp"], axis])
    start = time.monotonic()
    if axis.rank == 0:
        first = distress.call("out of paper")
        assert distress.call("something else") == first  # a second call changes nothing
        return first, 0.0
    with pytest.raises(RuntimeError):
        receive(torch.zeros(3), axis, axis.rank - 1).wait()
    return distress.call(f"rank {axis.rank} lost a peer"), time.monotonic() - start


@pytest.mark.gloo(reason="no RuntimeError frees a rank whose device waits, see the next test")
def test_everybody_hears_the_first_cause_within_seconds() -> None:
    for cause, seconds in spawn(give_up, dp=3, preload=("torch._dynamo",)):
        assert cause == "out of paper" and seconds < 5


def overhear(mesh: Mesh) -> tuple[str, float]:
    """Axes that say nccl: nobody waits for a peer in this process, so every rank must listen."""
    distress = FailureBroadcast([dataclasses.replace(mesh["dp"], backend="fake_nccl")])
    start = time.monotonic()
    if mesh.rank == 1:
        return distress.call("out of ink"), 0.0
    while not distress.cause_found and time.monotonic() < start + 10:
        time.sleep(0.01)
    return distress.cause_found, time.monotonic() - start


def test_where_devices_wait_every_rank_listens() -> None:
    heard = spawn(overhear, dp=3, preload=("torch._dynamo",))
    assert all(cause == "out of ink" and seconds < 5 for cause, seconds in heard)


class Hanging:
    """A group whose abort ends when all are aborted: their operations block the device."""

    together = threading.Barrier(2, timeout=20)

    def abort(self) -> None:
        self.together.wait()


def abort_two(mesh: Mesh) -> bool:
    axes = [dataclasses.replace(mesh["dp"], backend="fake_nccl", group=Hanging()) for _ in range(2)]
    FailureBroadcast(axes).call("out of time")
    return Hanging.together.broken


def test_all_communicators_are_aborted_at_once() -> None:
    assert spawn(abort_two, dp=2, preload=("torch._dynamo",)) == [False] * 2


def forget(mesh: Mesh) -> int:
    """Threads that still listen when nobody holds the line."""
    axis = dataclasses.replace(mesh["dp"], backend="fake_nccl")
    before = threading.active_count()
    distress = FailureBroadcast([axis])
    assert threading.active_count() == before + 1
    del distress
    time.sleep(1)
    return threading.active_count() - before


def test_nobody_listens_to_a_line_that_is_gone() -> None:
    assert spawn(forget, dp=2, preload=("torch._dynamo",)) == [0, 0]


def test_one_rank_has_nobody_to_tell() -> None:
    assert FailureBroadcast([Axis.solo("pp")]).call("alone") == "alone"
