"""Tensors between two ranks of an axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from kenotron_dist.axis import Axis
from kenotron_dist.handle import Flight, Handle, Work, start_exchange
from kenotron_dist.message_size import of_transfer


class Route:
    """One transfer that is made again and again, looked up once.

    On gloo a send meets the receive of the same tag, on nccl the next one between these two ranks.

    Args:
        axis: of both ranks.
        peer: index of the other rank.
        tag: the same there.
        sends: this rank sends; else it receives.

    Raises:
        ValueError: the index is no other rank of the axis.
    """

    def __init__(self, axis: Axis, peer: int, tag: int = 0, *, sends: bool) -> None:
        verb = "send" if sends else "receive"
        _check_other(axis, peer, verb)
        assert axis.group is not None  # there is another rank
        # The group itself: torch's isend looks the ranks up again every time.
        self._verb = axis.group.send if sends else axis.group.recv
        self._axis, self._place, self._tag, self._sends = axis, axis.places[peer], tag, sends
        me, other = axis.ranks[axis.rank], axis.ranks[peer]
        ranks = (me, other) if sends else (other, me)
        self._called = (f"{axis.name}:{ranks[0]}>{ranks[1]}#{tag}", axis.name, ranks, verb)
        self._site = None if axis.pulse is None else axis.pulse.call_site()

    def start(self, x: Tensor) -> Handle:
        """Start sending ``x`` (any shape), or receiving into it.

        Call ``wait`` before it is changed or freed. Shape and dtype are the same on both ranks.

        Raises ValueError when ``x`` is received and not contiguous.
        """
        if self._sends:
            x = (x.detach() if x.requires_grad else x).contiguous()
        elif not x.is_contiguous():
            raise ValueError("receive: the tensor must be contiguous, it is overwritten in place")
        axis = self._axis
        if axis.pulse is None:
            return Handle(Flight(axis, None, self._verb([x], self._place, self._tag)), x)
        ticket = axis.pulse.issue(*self._called, self._site)
        call: Callable[[], Work] = partial(self._verb, [x], self._place, self._tag)
        if axis.pulse.listeners:
            axis.pulse.announce(of_transfer(ticket, x, sends=self._sends))
        return Handle(Flight(axis, ticket, axis.pulse.wait(ticket, call)), x)


def send(x: Tensor, axis: Axis, to: int, tag: int = 0) -> Handle:
    """Start sending ``x`` (any shape) to index ``to`` of the axis.

    Call ``wait`` before it is changed or freed. On gloo a send meets the receive of the same tag,
    on nccl the next one between these two ranks. Raises ValueError when ``to`` is no other rank of
    the axis.
    """
    return Route(axis, to, tag, sends=True).start(x)


def receive(out: Tensor, axis: Axis, source: int, tag: int = 0) -> Handle:
    """Start receiving into ``out`` (of the shape that is sent) from index ``source`` of the axis.

    Raises ValueError when ``out`` is not contiguous, or ``source`` is no other rank of the axis.
    """
    return Route(axis, source, tag, sends=False).start(out)


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
    """Send ``x`` (any shape) to the rank ``by`` places on in the ring; return what arrives.

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
        return Handle(None, kept) if async_op else kept
    x = x.detach()
    arriving = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    sent: list[list[Tensor]] = [[]] * axis.size
    received = list(sent)
    sent[(axis.rank + by) % axis.size] = [x.contiguous()]
    received[(axis.rank - by) % axis.size] = [arriving]
    handle = Handle(start_exchange(axis, "shift", x, sent, received, by), arriving)
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
