"""TORCH_DISTRIBUTED_DEBUG=DETAIL compares how much each rank has done: exchanges count alike."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from kenotron_dist import (
    Axis,
    Mesh,
    all_gather,
    all_reduce,
    broadcast,
    gather_pieces,
    gather_rows,
    reduce_scatter,
    shift,
    sum_rows,
)
from kenotron_dist.testing import on_ranks

LARGE = 70_000  # elements; they travel alone


def uneven_pieces(axis: Axis) -> None:
    """Rank i has i large pieces, and the first rank none."""
    pieces = [[torch.full((LARGE,), float(i)) for _ in range(i)] for i in range(axis.size)]
    found = [[torch.zeros(LARGE) for _ in range(i)] for i in range(axis.size)]
    found[axis.rank] = pieces[axis.rank]
    gather_pieces(found, axis).wait()
    assert found[-1][0][0] == axis.size - 1


VERBS: dict[str, Callable[[Axis], object]] = {
    "all_reduce": lambda axis: all_reduce(torch.ones(LARGE), axis),
    "all_reduce of few": lambda axis: all_reduce(torch.ones(3), axis),
    "all_gather": lambda axis: all_gather(torch.ones(5), axis),
    "broadcast": lambda axis: broadcast(torch.ones(5), axis, source=1),
    "gather_pieces": uneven_pieces,
    "gather_rows": lambda axis: gather_rows(torch.ones(axis.size, LARGE), axis).wait(),
    "shift": lambda axis: shift(torch.ones(5), axis),
    "sum_rows": lambda axis: sum_rows(torch.ones(axis.size, 5), axis).wait(),
}


def compared_after_each(mesh: Mesh) -> str:
    """The verb after which torch finds that ranks have done different numbers of operations."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return "DETAIL is off"
    axis = mesh["tp", "dp"]
    for name, verb in VERBS.items():
        verb(axis)
        try:
            reduce_scatter(torch.ones(axis.size), axis)
        except RuntimeError as error:
            return f"{name}: {error}"
    return ""


@pytest.mark.gloo(reason="NCCL counts batches")
def test_torch_compares_ranks_after_every_exchange() -> None:
    assert on_ranks(compared_after_each, dp=2, tp=2) == [""] * 4
