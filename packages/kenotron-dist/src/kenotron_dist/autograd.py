"""Collectives with gradients: each one's backward is its transpose.

| function              | forward        | backward        |
|-----------------------|----------------|-----------------|
| ``copy_to``           | identity       | all-reduce      |
| ``reduce_from``       | all-reduce     | identity        |
| ``gather_from``       | all-gather     | own slice       |
| ``scatter_to``        | own slice      | all-gather      |
| ``all_gather_from``   | all-gather     | reduce-scatter  |
| ``reduce_scatter_to`` | reduce-scatter | all-gather      |
| ``all_to_all``        | all-to-all     | all-to-all back |

The first four leave or enter a region where every rank computes the same; the next two a region
where every rank holds other rows (sequence parallelism). The names are Megatron-LM's
(arXiv 1909.08053, 2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kenotron_dist import collectives
from kenotron_dist.axis import Axis

__all__ = [
    "all_gather_from",
    "all_to_all",
    "copy_to",
    "gather_from",
    "reduce_from",
    "reduce_scatter_to",
    "scatter_to",
]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grads[0], ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return collectives.all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collectives.all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own(grads[0], ctx.axis, ctx.dim), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _own(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grads[0], ctx.axis, ctx.dim), None, None


class _AllGatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collectives.all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return collectives.reduce_scatter(grads[0], ctx.axis, ctx.dim), None, None


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collectives.reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grads[0], ctx.axis, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        send: Sequence[int] | None,
        receive: Sequence[int] | None,
    ) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return collectives.all_to_all(x, axis, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.all_to_all(grads[0], ctx.axis, ctx.receive, ctx.send), None, None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Return ``x`` (any shape); its gradient is summed over the axis (Megatron's *f*)."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum ``x`` (any shape) over the axis; the gradient passes unchanged (Megatron's *g*)."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Return all parts along ``dim``, for a result that every rank uses the same way.

    Shapes for ``dim`` -1: (..., n/t) -> (..., n).
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim)


def scatter_to(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Return this rank's part along ``dim`` of a value that is the same everywhere.

    Shapes for ``dim`` -1: (..., n) -> (..., n/t).

    Raises ValueError when the axis does not divide the dimension.
    """
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dim)


def all_gather_from(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return all rows, for ranks that then compute different things with them.

    Shapes for ``dim`` 0: (n/t, ...) -> (n, ...).
    """
    return x if axis.size == 1 else _AllGatherFrom.apply(x, axis, dim)


def reduce_scatter_to(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's rows of the sum over the axis.

    Shapes for ``dim`` 0: (n, ...) -> (n/t, ...).

    Raises ValueError when the axis does not divide the dimension.
    """
    return x if axis.size == 1 else _ReduceScatterTo.apply(x, axis, dim)


def all_to_all(
    x: Tensor,
    axis: Axis,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> Tensor:
    """Deal rows (N, ...) to all ranks (see ``collectives.all_to_all``); gradients travel back.

    Raises ValueError when the counts do not fit.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis, send, receive)


def _own(x: Tensor, axis: Axis, dim: int) -> Tensor:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"cannot split dim {dim} of size {x.shape[dim]} over {axis.size} {axis.name} ranks"
        )
    # A copy: what is changed in place later must not be the whole.
    part = x.chunk(axis.size, dim)[axis.rank]
    return part.clone(memory_format=torch.contiguous_format)
