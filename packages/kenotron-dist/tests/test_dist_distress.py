"""A rank that gives up frees those that wait for it, and they learn why."""

from __future__ import annotations

import time

import pytest
import torch

from kenotron_dist import Axis, Distress, Mesh, receive, spawn


def give_up(mesh: Mesh) -> tuple[str, float]:
    """Rank 2 waits for 1, 1 for 0, and 0 gives up: it has no connection that 2 waits on."""
    axis = mesh["dp"]
    for _ in range(2):  # the second line knows nothing of the first
        distress = Distress([axis, mesh.twin("dp"), mesh["tp"], axis])
    start = time.monotonic()
    if axis.rank == 0:
        first = distress.call("out of paper")
        assert distress.call("something else") == first  # a second call changes nothing
        return first, 0.0
    with pytest.raises(RuntimeError):
        receive(torch.zeros(3), axis, axis.rank - 1).wait()
    return distress.call(f"rank {axis.rank} lost a peer"), time.monotonic() - start


def test_everybody_hears_the_first_cause_within_a_second() -> None:
    for cause, seconds in spawn(give_up, dp=3, preload=("torch._dynamo",)):
        assert cause == "out of paper" and seconds < 1


def test_one_rank_has_nobody_to_tell() -> None:
    assert Distress([Axis.solo("pp")]).call("alone") == "alone"
