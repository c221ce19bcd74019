"""A communication under way: started, waited for, and recorded to explain a hang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from kenotron_dist.axis import Axis
from kenotron_dist.device import Mark
from kenotron_dist.fake_world import FAKE
from kenotron_dist.in_flight import Ticket
from kenotron_dist.message_size import of_exchange, of_verb

_POLL_SECONDS = 0.0005
_LAPS = 1 << 20  # tags of exchanges go round; those of transfers lie below them


class Work(Mark, Protocol):
    """The part of ``torch.distributed.Work`` that is used."""

    def wait(self) -> object:
        """Block until it is done."""
        ...


class _SeveralWorks:
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self.works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Flight(NamedTuple):
    """One operation of the backend, on its way."""

    axis: Axis
    ticket: Ticket | None
    work: Work | None

    def land(self) -> None:
        """Block until the operation is done (on nccl: let the current stream wait for it).

        Raises RuntimeError naming the operation and its ranks when a peer is lost.
        """
        pulse, work = self.axis.pulse, self.work
        if work is None:
            return
        if pulse is None or self.ticket is None:
            work.wait()
            return
        pulse.wait(self.ticket, work.wait)
        pulse.flying.discard(work)
        if self.axis.on_device:
            pulse.queued(self.ticket, self.axis.mark)


def settle(axis: Axis) -> None:
    """Block this process until its device has done what is queued; no-op on gloo.

    The watchdog sees the last communication while it blocks.
    """
    if not axis.on_device:
        return
    mark, pulse = axis.mark(), axis.pulse
    if pulse is None or pulse.last is None:
        _poll(mark)
    else:
        pulse.wait(pulse.last, partial(_poll, mark))


def _poll(mark: Mark) -> None:
    while not mark.is_completed():
        time.sleep(_POLL_SECONDS)


class Handle:
    """A communication under way. ``wait`` blocks until it is done and returns its result.

    Keep the handle, and leave the tensors alone, until then. Waiting twice is allowed.

    Args:
        flight: the operation that is awaited; None: nothing is.
        result: (any shape), or a function that returns it, or the handle of a next round.
        rounds: number of communications that follow one another.
    """

    def __init__(
        self,
        flight: Flight | None,
        result: Tensor | Callable[[], Tensor | Handle],
        rounds: int = 1,
    ) -> None:
        self.rounds = rounds
        self._flight = flight
        self._result = result

    def wait(self) -> Tensor:
        """Block until the communication is done; the result.

        Raises RuntimeError naming the operation and its ranks when a peer is lost.
        """
        while not isinstance(self._result, Tensor):
            self.advance()
        self._land()
        return self._result

    def advance(self) -> None:
        """Block until the present round is done and start the next, if there is one.

        A sum of many elements has two rounds: who computes for long before ``wait`` calls this
        half-way, so that both are hidden.
        """
        self._land()
        if isinstance(self._result, Tensor):
            return
        found = self._result()
        if isinstance(found, Handle):
            self._result, self._flight = found._result, found._flight
        else:
            self._result = found

    def _land(self) -> None:
        if self._flight is not None:
            self._flight.land()
            self._flight = None


def start(
    axis: Axis,
    operation: str,
    x: Tensor | Sequence[Tensor],
    verb: Callable[..., dist.Work | None],
    *args: Any,
    how: object = None,
) -> Flight:
    """Take a ticket and call torch's ``verb`` on the axis with ``args``.

    ``x`` is what the caller gave, one tensor or several, each of any shape, and ``how`` what else
    must be the same on all ranks (an op, a source): listeners are called. The call may block too,
    for the checks of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    pulse = axis.pulse
    call: Callable[[], Work | None] = partial(verb, *args, group=axis.group, async_op=True)
    if _shapes_only(axis, x):
        call = _nothing
    if pulse is None:
        return Flight(axis, None, call())
    ticket = pulse.issue(axis.channel, axis.name, axis.ranks, operation)
    if pulse.listeners:
        pulse.announce(of_verb(axis, ticket, x, how, verb, args))
    return Flight(axis, ticket, pulse.wait(ticket, call))


def start_exchange(
    axis: Axis,
    operation: str,
    x: Tensor | Sequence[Tensor],
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    how: object = None,
) -> Flight:
    """Take a ticket and start sending tensors to, and receiving some from, each rank of the axis.

    Both are lists in axis order, of tensors of any shape; this rank's own entry, and empty tensors,
    are skipped. All ranks call this together, with lists that fit. ``x`` and ``how``: see
    ``start``.
    """
    me, n = axis.rank, axis.size
    calls = [(dist.irecv, x, i) for i in ((me - k) % n for k in range(1, n)) for x in received[i]]
    calls += [(dist.isend, x, i) for i in ((me + k) % n for k in range(1, n)) for x in sent[i]]
    full = [(verb, x, i) for verb, x, i in calls if x.numel()]
    pulse = axis.pulse
    if pulse is None:
        apart = _shapes_only(axis, x)
        return Flight(axis, None, None if apart else _exchange(full, axis, axis.tag))
    ticket = pulse.issue(axis.channel, axis.name, axis.ranks, operation)
    call: Callable[[], Work] = partial(_exchange, full, axis, axis.tag + ticket.number % _LAPS)
    if _shapes_only(axis, x):
        call = partial(_SeveralWorks, ())
    if pulse.listeners:
        pulse.announce(of_exchange(axis, ticket, x, how, sent, received))
    work = pulse.wait(ticket, call)
    pulse.flying.add(work)  # a handle may be dropped: what arrives then needs its place
    return Flight(axis, ticket, work)


def _nothing() -> None:
    """Send nothing."""


def _shapes_only(axis: Axis, x: Tensor | Sequence[Tensor]) -> bool:
    """Return whether there is nothing to send: tensors on meta, no group, or one without ranks."""
    tensors = [x] if isinstance(x, Tensor) else x
    if axis.backend == FAKE:  # its control messages are on the CPU
        return all(each.device.type != "cpu" for each in tensors)
    return axis.group is None and all(each.device.type == "meta" for each in tensors)


def _exchange(
    calls: list[tuple[Callable[..., dist.Work | None], Tensor, int]], axis: Axis, tag: int
) -> _SeveralWorks:
    group, places = axis.group, axis.places
    assert group is not None  # there is another rank
    works = []
    # In a batch where devices wait: apart, two ranks that both send first never meet.
    batch = calls[0][1].device if axis.on_device and calls else None
    if batch is not None:
        group._start_coalescing(batch)
    try:
        for verb, x, i in calls:
            start = group.send if verb is dist.isend else group.recv
            works.append(start([x], places[i], tag))
    except BaseException:
        if batch is not None:  # an open batch would swallow what this thread calls on other groups
            with contextlib.suppress(RuntimeError):
                group._end_coalescing(batch)
        raise
    return _SeveralWorks(works if batch is None else [group._end_coalescing(batch)])
