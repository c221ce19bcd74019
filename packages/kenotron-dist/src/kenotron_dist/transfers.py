"""Tensors between two ranks of an axis."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from kenotron_dist.handle import Handle, start_exchange, start_transfer
from kenotron_dist.mesh import Axis


def send(x: Tensor, axis: Axis, to: int, tag: int = 0) -> Handle:
    """Start sending ``x`` to index ``to`` of the axis; ``wait`` before it is changed or freed.

    Raises ValueError when ``to`` is no other rank of the axis.
    """
    _check_other(axis, to, "send")
    x = x.detach().contiguous()
    flight = start_transfer(x, axis, axis.ranks[axis.rank], axis.ranks[to], tag)
    return Handle(flight, lambda: x)


def receive(out: Tensor, axis: Axis, source: int, tag: int = 0) -> Handle:
    """Start receiving into ``out`` from index ``source`` of the axis.

    Raises ValueError when ``out`` is not contiguous, or ``source`` is no other rank of the axis.
    """
    _check_other(axis, source, "receive")
    if not out.is_contiguous():
        raise ValueError("receive: the tensor must be contiguous, it is overwritten in place")
    flight = start_transfer(out, axis, axis.ranks[source], axis.ranks[axis.rank], tag)
    return Handle(flight, lambda: out)


@overload
def shift(
    x: Tensor, axis: Axis, by: int = ..., out: Tensor | None = ..., async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def shift(
    x: Tensor, axis: Axis, by: int = ..., out: Tensor | None = ..., *, async_op: Literal[True]
) -> Handle: ...
def shift(
    x: Tensor, axis: Axis, by: int = 1, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Handle:
    """Send ``x`` to the rank ``by`` places on in the ring, and return what arrives from behind.

    Shape and dtype are the same on all ranks. The result is written to ``out`` where it is given;
    without it, ``by`` 0 (or a whole lap) returns ``x`` itself. Raises ValueError when ``out`` is
    not contiguous or not like ``x``.
    """
    if out is not None and (
        not out.is_contiguous() or (out.shape, out.dtype) != (x.shape, x.dtype)
    ):
        raise ValueError(
            f"shift: out {out.dtype} {tuple(out.shape)} must be contiguous and like the tensor "
            f"that is sent, {x.dtype} {tuple(x.shape)}"
        )
    if by % axis.size == 0:
        kept = x if out is None else out.copy_(x)
        return Handle(None, lambda: kept) if async_op else kept
    x = x.detach()
    arriving = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    sent: list[Tensor | None] = [None] * axis.size
    received = list(sent)
    sent[(axis.rank + by) % axis.size] = x.contiguous()
    received[(axis.rank - by) % axis.size] = arriving
    handle = Handle(start_exchange(axis, "shift", sent, received), lambda: arriving)
    return handle if async_op else handle.wait()


def check_peer(axis: Axis, index: int, verb: str) -> None:
    """Raise ValueError when the axis has no such index."""
    if not 0 <= index < axis.size:
        raise ValueError(
            f"{verb}: index {index} is outside the {axis.name} axis of {axis.size} ranks"
        )


def _check_other(axis: Axis, index: int, verb: str) -> None:
    check_peer(axis, index, verb)
    if index == axis.rank:
        raise ValueError(f"{verb}: index {index} of the {axis.name} axis is this rank itself")
