"""Collectives in place, for buffers that are used again and again: memory that is new costs more
than the copy that fills it, and what every rank owns a part of need not be put together again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_dist.axis import Axis
from kenotron_dist.collectives import (
    start_gather,
    tree_sum,
)
from kenotron_dist.handle import Handle, start, start_exchange
from kenotron_dist.torch_names import all_gather_coalesced, reduce_scatter_single

_ALONE = 1 << 16
"""Bytes from which a piece travels by itself; smaller ones are packed together."""
_NOTHING = torch.empty(0)


def sum_rows(rows: Tensor, axis: Axis, room: Tensor | None = None) -> Handle:
    """Start replacing this rank's row of ``rows`` (n, ...) by the sum of that row on all ranks.

    The result is that row, the same bits as ``reduce_scatter``'s; other rows keep what they were.
    On gloo the rows of others arrive in ``room`` (n - 1, ...), which is new without one. Raises
    ValueError when there is not one row for each rank, or they are not contiguous.
    """
    _check_rows(rows, axis)
    own = rows[axis.rank]
    if axis.size == 1:
        return Handle(None, own)
    if axis.on_device:
        flat = rows.view(-1)
        flight = start(axis, "sum_rows", rows, reduce_scatter_single, own.view(-1), flat)
        return Handle(flight, own)
    arriving = rows.new_empty(axis.size - 1, *own.shape) if room is None else room
    others = [i for i in range(axis.size) if i != axis.rank]
    parts = list(rows.unbind())
    received: list[list[Tensor]] = [[]] * axis.size
    for place, i in zip(arriving, others, strict=True):
        parts[i], received[i] = place, [place]
    flight = start_exchange(axis, "sum_rows", rows, [[row] for row in rows.unbind()], received)
    return Handle(flight, lambda: tree_sum(parts, out=own, keep=axis.rank))


def gather_rows(rows: Tensor, axis: Axis) -> Handle:
    """Start filling ``rows`` (n, ...), of which each rank has written its own; the result is it.

    Raises ValueError when there is not one row for each rank, or they are not contiguous.
    """
    _check_rows(rows, axis)
    return Handle(start_gather(rows, axis, "gather_rows") if axis.size > 1 else None, rows)


def gather_pieces(pieces: Sequence[Sequence[Tensor]], axis: Axis) -> Handle:
    """Start overwriting ``pieces[i]`` by what rank i has there, on all ranks and for every i.

    Pieces are contiguous, such as ranges of flattened parameters; lists have the same shapes and
    dtypes on all ranks, and may be empty. The result is an empty tensor. On NCCL, k-th pieces of
    one size that follow one another in one memory are gathered in place, all of them in one launch;
    others are packed. Raises ValueError when there is not one list for each rank.
    """
    if len(pieces) != axis.size:
        raise ValueError(
            f"gather_pieces: {len(pieces)} lists for {axis.size} {axis.name} ranks: give one each"
        )
    if axis.size == 1:
        return Handle(None, _NOTHING)
    handles = []
    alone = float("inf") if axis.on_device or axis.counts_transfers else _ALONE
    if axis.on_device:
        wholes, pieces = _in_place(pieces)
        if wholes:
            handles.append(_gather_in_place(wholes, axis))
    large = [[x for x in own if x.nbytes >= alone] for own in pieces]
    small = [[x for x in own if x.nbytes < alone] for own in pieces]
    if any(large):
        own = large[axis.rank]
        flight = start_exchange(axis, "gather_pieces", own, [own] * axis.size, large)
        handles.append(Handle(flight, _NOTHING))
    for dtype in dict.fromkeys(x.dtype for own in small for x in own):
        same_dtype = [[x for x in own if x.dtype == dtype] for own in small]
        handles.append(_gather_packed(same_dtype, axis))

    def finish() -> Tensor:
        for handle in handles:
            handle.wait()
        return _NOTHING

    return Handle(None, finish)


def _in_place(
    pieces: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], Sequence[Sequence[Tensor]]]:
    """Flat tensors of which the ranks' pieces are equal parts, in order; and the other pieces."""
    n = len(pieces)
    if len({len(own) for own in pieces}) > 1:
        return [], pieces
    wholes: list[Tensor] = []
    rest: list[list[Tensor]] = [[] for _ in pieces]
    for parts in zip(*pieces, strict=True):
        first = parts[0]
        memory = first.untyped_storage().data_ptr()
        follow = all(
            x.numel() == first.numel()
            and x.untyped_storage().data_ptr() == memory
            and x.storage_offset() == first.storage_offset() + i * first.numel()
            for i, x in enumerate(parts)
        )
        if follow and first.numel():
            wholes.append(first.as_strided((n * first.numel(),), (1,)))
        else:
            for own, x in zip(rest, parts, strict=True):
                own.append(x)
    return wholes, rest


def _gather_in_place(wholes: Sequence[Tensor], axis: Axis) -> Handle:
    """Start completing flat tensors of which this rank has written its part. Without a copy."""
    own = [whole.chunk(axis.size)[axis.rank] for whole in wholes]
    flight = start(axis, "gather_pieces (in place)", own, all_gather_coalesced, wholes, own)
    return Handle(flight, _NOTHING)


def _gather_packed(pieces: Sequence[Sequence[Tensor]], axis: Axis) -> Handle:
    """The same for pieces of one dtype, side by side in a row for each rank."""
    width = max(sum(x.numel() for x in own) for own in pieces)
    like = next(x for own in pieces for x in own)
    rows = like.new_empty(axis.size, width)
    _move(rows[axis.rank], pieces[axis.rank], out_of_row=False)
    flight = start_gather(rows, axis, "gather_pieces (packed)")

    def unpack() -> Tensor:
        for i, own in enumerate(pieces):
            if i != axis.rank:
                _move(rows[i], own, out_of_row=True)
        return _NOTHING

    return Handle(flight, unpack)


def _move(row: Tensor, pieces: Sequence[Tensor], *, out_of_row: bool) -> None:
    start = 0
    for x in pieces:
        place = row[start : start + x.numel()].view_as(x)
        x.copy_(place) if out_of_row else place.copy_(x)
        start += x.numel()


def _check_rows(rows: Tensor, axis: Axis) -> None:
    if not rows.ndim or rows.shape[0] != axis.size or not rows.is_contiguous():
        raise ValueError(
            f"rows {tuple(rows.shape)} must be contiguous, one for each of the {axis.size} "
            f"{axis.name} ranks"
        )
