"""Ranks that a gradient is summed over: those that own slices, and their replicas.

Hybrid sharding (Zhao et al., arXiv 2304.11277): blocks of consecutive data ranks, such as those of
a machine, have all slices; ranks of the same place in all blocks have the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kenotron_dist import Axis, Handle, Mesh, all_reduce, sum_rows
from kenotron_optim.config import shard_ranks_problems
from kenotron_optim.config_fields import raise_all


@dataclass(frozen=True)
class DataAxes:
    """The ranks over which the gradients of a bucket are summed."""

    slices: Axis
    """Its ranks own different slices."""
    replicas: Axis | None = None
    """Ranks that own the same slices; None: there is one only."""


def data_axes(mesh: Mesh, axes: tuple[str, ...], shard_ranks: int | None) -> DataAxes:
    """Return them for a bucket that is reduced over ``axes``.

    Args:
        mesh: the mesh.
        axes: dp and cp, or edp, which is never cut into blocks.
        shard_ranks: ranks of dp in a block; None: all.

    Raises:
        ValueError: ``shard_ranks`` does not divide dp.
    """
    dp = mesh.sizes["dp"]
    raise_all(shard_ranks_problems(shard_ranks, dp))
    if shard_ranks is None or shard_ranks == dp or "dp" not in axes:
        return DataAxes(mesh[axes])
    return DataAxes(*mesh.blocks(axes, shard_ranks * mesh.sizes["cp"]))


def sum_slices(rows: Tensor, axes: DataAxes, room: Tensor | None = None) -> Handle:
    """Start replacing this rank's row of ``rows`` (n, ...) by its sum over all ranks.

    First within the block, then over replicas: the bits of one sum over all, which is a tree, where
    the ranks of a block are a power of two. ``room``: see ``sum_rows``.
    """
    within, own = sum_rows(rows, axes.slices, room), rows[axes.slices.rank]
    if axes.replicas is None:
        return within

    def across() -> Handle:
        within.wait()
        return sum_replicas(own, axes)

    return Handle(None, across, rounds=2)


def sum_replicas(own: Tensor, axes: DataAxes) -> Handle:
    """Start adding what replicas have of the same slices, of any shape, in place."""
    if axes.replicas is None:
        return Handle(None, own)
    summed = all_reduce(own, axes.replicas, async_op=True)
    return Handle(None, lambda: own.copy_(summed.wait()))
