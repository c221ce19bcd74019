"""Collectives. Every one is a no-op on an axis of size 1.

Sums on gloo do not use gloo's reductions, whose order of additions depends on an element's place
in the buffer. Pieces are exchanged and added here, in a fixed binary tree over the ranks, in fp32
for half-precision tensors: the sum of an element depends on nothing but its addends, and every
rank gets the same bits. NCCL keeps its own (fast) reductions and promises neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron_dist.axis import Axis
from kenotron_dist.handle import (
    Flight,
    Handle,
    settle,
    start,
    start_exchange,
)
from kenotron_dist.point_to_point import check_peer
from kenotron_dist.sum_tree import tree_sum
from kenotron_dist.torch_names import all_gather_single, reduce_scatter_single

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SMALL = 16_384
"""Elements up to which all ranks exchange whole tensors: one round instead of two."""
_LARGE = 1 << 21
"""Bytes from which two ranks exchange a row directly."""


@overload
def all_reduce(x: Tensor, axis: Axis, op: str = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_reduce(x: Tensor, axis: Axis, op: str = ..., *, async_op: Literal[True]) -> Handle: ...
def all_reduce(x: Tensor, axis: Axis, op: str = "sum", async_op: bool = False) -> Tensor | Handle:
    """Sum (or ``max``, ``min``) of every rank's ``x`` (any shape); a new tensor, ``x`` is kept.

    On an axis of size 1 the result is ``x`` itself. An async sum of more than 16,384 elements
    communicates once more in ``wait`` (or ``advance``): there all ranks must keep the same
    order. Raises ValueError for an unknown ``op``.
    """
    if op not in _OPS:
        raise ValueError(f"all_reduce: op {op!r} is not one of {', '.join(_OPS)}")
    if axis.size == 1:
        return _done(axis, x, async_op)
    x = x.detach()
    # Maxima and minima do not depend on an order, and NCCL keeps its own sums.
    if op != "sum" or axis.backend != "gloo":
        out = x.clone(memory_format=torch.contiguous_format)
        flight = start(axis, "all_reduce", x, dist.all_reduce, out, _OPS[op], how=op)
        return _deliver(Handle(flight, out), async_op)
    # Large tensors: each rank sums a piece, so that 2 (n - 1) / n of the tensor leaves a rank, and
    # not n - 1 times the tensor, as below.
    if axis.size > 2 and x.numel() > _SMALL:
        return _deliver(_two_rounds(x, x.contiguous().view(-1), axis), async_op)
    flight, parts = _start_pieces(x, [x.contiguous()] * axis.size, axis)
    return _deliver(Handle(flight, lambda: tree_sum(parts, keep=axis.rank)), async_op)


def _two_rounds(x: Tensor, flat: Tensor, axis: Axis) -> Handle:
    """Each rank sums its own piece, then the sums are gathered."""
    # Pieces are equally long; the last one is filled up with zeros.
    piece = -(-flat.numel() // axis.size)
    padded = flat
    if piece * axis.size != flat.numel():
        padded = flat.new_zeros(piece * axis.size)
        padded[: flat.numel()] = flat
    flight, parts = _start_pieces(x, padded.chunk(axis.size), axis)

    def gather() -> Handle:
        out = flat.new_empty(axis.size, piece)
        tree_sum(parts, out=out[axis.rank], keep=axis.rank)
        second = start_gather(out, axis, "all_reduce (second round)")
        return Handle(second, lambda: no_view(out.view(-1)[: flat.numel()], x.shape))

    return Handle(flight, gather, rounds=2)


def _start_pieces(x: Tensor, pieces: Sequence[Tensor], axis: Axis) -> tuple[Flight, list[Tensor]]:
    """Start sending each rank its piece of a sum; what they send this one, in axis order."""
    parts = [torch.empty_like(piece) for piece in pieces]
    parts[axis.rank] = pieces[axis.rank]
    sent, received = ([[part] for part in tensors] for tensors in (pieces, parts))
    return start_exchange(axis, "all_reduce", x, sent, received, "sum"), parts


@overload
def all_gather(x: Tensor, axis: Axis, dim: int = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_gather(x: Tensor, axis: Axis, dim: int = ..., *, async_op: Literal[True]) -> Handle: ...
def all_gather(x: Tensor, axis: Axis, dim: int = 0, async_op: bool = False) -> Tensor | Handle:
    """Every rank's ``x`` (same shape everywhere) concatenated along ``dim`` in axis order."""
    if axis.size == 1:
        return _done(axis, x, async_op)
    x = x.detach()
    rows = x.new_empty(axis.size, *x.shape)
    rows[axis.rank] = x
    flight = start_gather(rows, axis, "all_gather")

    def finish() -> Tensor:
        if dim == 0 and x.ndim:
            return no_view(rows, (axis.size * x.shape[0], *x.shape[1:]))
        return torch.cat(rows.unbind(), dim) if x.ndim else rows

    return _deliver(Handle(flight, finish), async_op)


def start_gather(rows: Tensor, axis: Axis, operation: str) -> Flight:
    """Start filling ``rows`` (n, ...), of which each rank has written its own.

    From 3 ranks on gloo they exchange directly, two ranks do large rows: 1.3 to 3 times as fast as
    its ring on one host.
    """
    own = rows[axis.rank]
    if axis.backend != "gloo" or (axis.size == 2 and own.nbytes < _LARGE):
        return start(axis, operation, own, all_gather_single, rows.view(-1), own.view(-1))
    received = [[row] for row in rows.unbind()]
    return start_exchange(axis, operation, own, [[own]] * axis.size, received)


@overload
def reduce_scatter(
    x: Tensor, axis: Axis, dim: int = ..., async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, axis: Axis, dim: int = ..., *, async_op: Literal[True]) -> Handle: ...
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, async_op: bool = False) -> Tensor | Handle:
    """Return this rank's part, along ``dim``, of the sum of every rank's ``x`` (any shape).

    For t ranks and ``dim`` 0: (N, ...) -> (N / t, ...).
    Raises ValueError when the axis does not divide the dimension.
    """
    if axis.size == 1:
        return _done(axis, x, async_op)
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"reduce_scatter: cannot split dim {dim} of size {x.shape[dim]} over {axis.size} "
            f"{axis.name} ranks"
        )
    first = x.detach().movedim(dim, 0).contiguous()
    part = (first.shape[0] // axis.size, *first.shape[1:])
    if axis.backend == "gloo":
        # Every rank gets all addends of its part, and adds them up in the order of the tree.
        rows = first.new_empty(axis.size, *part)
        sent = first.view(-1)
        flight = start(axis, "reduce_scatter", x, dist.all_to_all_single, rows.view(-1), sent)
        handle = Handle(flight, lambda: _moved(tree_sum(rows), dim))
    else:
        out = first.new_empty(part)
        verb, flat = reduce_scatter_single, first.view(-1)
        flight = start(axis, "reduce_scatter", x, verb, out.view(-1), flat)
        handle = Handle(flight, lambda: _moved(out, dim))
    return _deliver(handle, async_op)


@overload
def all_to_all(
    x: Tensor,
    axis: Axis,
    send: Sequence[int] | None = ...,
    receive: Sequence[int] | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def all_to_all(
    x: Tensor,
    axis: Axis,
    send: Sequence[int] | None = ...,
    receive: Sequence[int] | None = ...,
    *,
    async_op: Literal[True],
) -> Handle: ...
def all_to_all(
    x: Tensor,
    axis: Axis,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """Send rows of ``x`` (N, ...) to every rank and concatenate what they sent, in axis order.

    ``send[i]`` rows go to rank i and ``receive[i]`` rows come from it; zero is allowed. Without
    them rows are dealt evenly. Raises ValueError when the counts do not fit, or one is missing.
    """
    if (send is None) != (receive is None):
        raise ValueError("all_to_all: give both send and receive counts, or neither")
    counts = _counts(x.shape[0], axis, send, "send")
    incoming = counts if receive is None else _counts(sum(receive), axis, receive, "receive")
    if axis.size == 1:
        return _done(axis, x, async_op)
    out = x.new_empty(sum(incoming), *x.shape[1:])
    rows = x.detach().contiguous()
    flight = start(axis, "all_to_all", x, dist.all_to_all_single, out, rows, incoming, counts)
    return _deliver(Handle(flight, out), async_op)


@overload
def broadcast(
    x: Tensor, axis: Axis, source: int = ..., async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def broadcast(x: Tensor, axis: Axis, source: int = ..., *, async_op: Literal[True]) -> Handle: ...
def broadcast(x: Tensor, axis: Axis, source: int = 0, async_op: bool = False) -> Tensor | Handle:
    """Overwrite ``x`` (any shape) with that of the rank at index ``source``, and return it.

    Raises ValueError when ``x`` is not contiguous or the axis has no such index.
    """
    check_peer(axis, source, "broadcast")
    if not x.is_contiguous():
        raise ValueError("broadcast: the tensor must be contiguous, it is overwritten in place")
    if axis.size == 1:
        return _done(axis, x, async_op)
    nothing: list[list[Tensor]] = [[]] * axis.size
    if axis.backend != "gloo" or axis.counts_transfers:
        flight = start(axis, "broadcast", x, dist.broadcast, x, axis.ranks[source], how=source)
    elif axis.rank == source:
        outgoing = [[x.detach()]] * axis.size
        flight = start_exchange(axis, "broadcast", x, outgoing, nothing, source)
    else:
        incoming = [[x.detach()] if i == source else [] for i in range(axis.size)]
        flight = start_exchange(axis, "broadcast", x, nothing, incoming, source)
    return _deliver(Handle(flight, x), async_op)


def barrier(axis: Axis) -> None:
    """Block this process, not only its device, until every rank of the axis has called this."""
    if axis.size > 1:
        all_reduce(torch.zeros(1, device=axis.control_device), axis)
        settle(axis)


def no_view(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x``, of any shape, in ``shape``, and no view for autograd: it may be changed in place.

    Only for storage that nothing else uses.
    """
    return torch.ops.aten._unsafe_view(x, shape)


def _moved(x: Tensor, dim: int) -> Tensor:
    """``x`` with dim 0 moved to ``dim``, no view either."""
    return x if dim in (0, -x.ndim) else x.movedim(0, dim).contiguous()


def _done(axis: Axis, x: Tensor, async_op: bool) -> Tensor | Handle:
    return Handle(None, x) if async_op else x


def _deliver(handle: Handle, async_op: bool) -> Tensor | Handle:
    return handle if async_op else handle.wait()


def _counts(rows: int, axis: Axis, counts: Sequence[int] | None, what: str) -> list[int]:
    if counts is None:
        if rows % axis.size:
            raise ValueError(
                f"all_to_all: cannot deal {rows} rows evenly to {axis.size} {axis.name} ranks: "
                "give send and receive counts"
            )
        return [rows // axis.size] * axis.size
    if len(counts) != axis.size or sum(counts) != rows or min(counts) < 0:
        raise ValueError(
            f"all_to_all: {what} counts {list(counts)} do not deal {rows} rows to {axis.size} "
            f"{axis.name} ranks"
        )
    return list(counts)
