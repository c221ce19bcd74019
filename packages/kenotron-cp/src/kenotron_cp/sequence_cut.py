"""Cut a tensor along the sequence, and join the parts again.

B rows, S tokens, n tokens of a rank (``Cut.local``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kenotron_cp.layout import Cut, Layout
from kenotron_dist import Axis, all_gather


class _CutSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, cut: Cut, fill: float) -> Tensor:
        ctx.made = axis, dim, cut
        return _own(x, axis.rank, dim, cut, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        axis, dim, cut = ctx.made
        return _whole(grads[0], axis, dim, cut), None, None, None, None


class _JoinSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, cut: Cut) -> Tensor:
        ctx.made = axis, dim, cut
        return _whole(x, axis, dim, cut)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        axis, dim, cut = ctx.made
        return _own(grads[0], axis.rank, dim, cut, 0), None, None, None


def cut_sequence(
    x: Tensor, axis: Axis, dim: int = 1, *, layout: Layout = Layout(), fill: float = 0
) -> Tensor:
    """Return this rank's tokens of a tensor that is the same on every rank.

    Args:
        x: (..., S, ...), any dtype, its S tokens along ``dim``. Cut token ids, labels and positions
            so: shift labels before the cut, and cut global positions instead of counting local
            ones.
        axis: the ranks over which the sequence is cut. On one rank the result is ``x``.
        dim: the dimension of the sequence.
        layout: which tokens a rank holds.
        fill: value of the padding, which follows the last token where S is not a multiple of the
            strips (16 for 1, 2, 4 and 8 ranks).

    Returns:
        (..., n, ...): n tokens along ``dim``. The backward pass is an all-gather over ``axis``:
        every rank gets the gradient of the whole tensor.
    """
    cut = Cut(x.shape[dim], axis.size, layout)
    return x if axis.size == 1 else _CutSequence.apply(x, axis, dim, cut, fill)


def join_sequence(
    x: Tensor, axis: Axis, sequence: int, dim: int = 1, *, layout: Layout = Layout()
) -> Tensor:
    """Return the whole sequence, in order and without padding, from the tokens of every rank.

    Args:
        x: (..., n, ...): n tokens along ``dim``, as ``cut_sequence`` returns them.
        axis: the ranks over which the sequence is cut.
        sequence: S.
        dim: the dimension of the sequence.
        layout: the layout of the cut.

    Returns:
        (..., S, ...): S tokens along ``dim``. All-gather over ``axis``. The result is meant for a
        computation that is the same on every rank: in the backward pass each rank keeps its own
        tokens' gradient, and nothing is communicated.

    Raises:
        ValueError: ``x`` does not have n tokens.
    """
    cut = Cut(sequence, axis.size, layout)
    if x.shape[dim] != cut.local:
        raise ValueError(
            f"join_sequence: dim {dim} has {x.shape[dim]} tokens; {sequence} tokens on "
            f"{axis.size} {axis.name} ranks are {cut.local} a rank: give the tensor as "
            "cut_sequence cut it, and the same layout"
        )
    return x if axis.size == 1 else _JoinSequence.apply(x, axis, dim, cut)


def _own(x: Tensor, rank: int, dim: int, cut: Cut, fill: float) -> Tensor:
    """Tokens of a rank, those from S on filled."""
    length, parts = cut.chunk_length, []
    for chunk in cut.held(rank):
        begin = min(chunk * length, cut.sequence)
        parts.append(x.narrow(dim, begin, min(length, cut.sequence - begin)))
        missing = length - parts[-1].shape[dim]
        if missing:
            shape = list(x.shape)
            shape[dim] = missing
            parts.append(x.new_full(shape, fill))
    return torch.cat(parts, dim)


def _whole(x: Tensor, axis: Axis, dim: int, cut: Cut) -> Tensor:
    """Tokens of all ranks in order, without padding."""
    return in_order(all_gather(x, axis, dim), dim, cut).narrow(dim, 0, cut.sequence)


def in_order(x: Tensor, dim: int, cut: Cut) -> Tensor:
    """Put the tokens of all ranks, one rank after the other, into the order of the sequence.

    (..., ranks * n, ...), along ``dim``; so is the result.
    """
    held = [chunk for rank in range(cut.ranks) for chunk in cut.held(rank)]
    return _permuted(x, dim, cut, [held.index(chunk) for chunk in range(len(held))])


def by_rank(x: Tensor, dim: int, cut: Cut) -> Tensor:
    """Undo ``in_order``: put a padded sequence, (..., ranks * n, ...), into the order of ranks."""
    held = [chunk for rank in range(cut.ranks) for chunk in cut.held(rank)]
    return _permuted(x, dim, cut, held)


def _permuted(x: Tensor, dim: int, cut: Cut, order: list[int]) -> Tensor:
    if order == sorted(order):
        return x
    parts = x.split(cut.chunk_length, dim)
    return torch.cat([parts[i] for i in order], dim)
