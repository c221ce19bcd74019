"""A communication under way: started, waited for, and noted for whoever must explain a stall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from kenotron_dist.mesh import Axis
from kenotron_dist.pulse import Job, Ticket

_LAPS = 1 << 20  # tags of exchanges go round; those of transfers lie below them


class Work(Job, Protocol):
    """The part of ``torch.distributed.Work`` that is used."""

    def wait(self) -> object:
        """Block until it is done."""
        ...


class _Together:
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
        with pulse.waiting(self.ticket):
            work.wait()
        pulse.flying.discard(work)
        if self.axis.backend == "nccl":
            pulse.queued(self.ticket, work)


class Handle:
    """A communication under way. ``wait`` blocks until it is done and returns its result.

    Keep the handle, and leave the tensors alone, until then. Waiting twice is allowed.
    """

    def __init__(
        self, flight: Flight | None, finish: Callable[[], Tensor | Handle], rounds: int = 1
    ) -> None:
        self.rounds = rounds
        """How many communications follow one another."""
        self._flight = flight
        self._finish: Callable[[], Tensor | Handle] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the communication is done; the result.

        Raises RuntimeError naming the operation and its ranks when a peer is lost.
        """
        while self._finish is not None:
            self.advance()
        assert self._result is not None  # set by the last round
        return self._result

    def advance(self) -> None:
        """Block until the present round is done and start the next, if there is one.

        A sum of many elements has two rounds: who computes for long before ``wait`` calls this
        half-way, so that both are hidden.
        """
        if self._finish is None:
            return
        if self._flight is not None:
            self._flight.land()
        found, self._finish, self._flight = self._finish(), None, None
        if isinstance(found, Handle):
            self._finish, self._flight = found._finish, found._flight
        else:
            self._result = found


def start(axis: Axis, operation: str, verb: Callable[..., dist.Work | None], *args: Any) -> Flight:
    """Take a ticket and call torch's ``verb`` on the axis with ``args``.

    The call may block too: for a device's first communicator, or for the checks of
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    if axis.pulse is None:
        return Flight(axis, None, verb(*args, group=axis.group, async_op=True))
    ticket = axis.pulse.issue(axis.channel, axis.name, axis.ranks, operation)
    with axis.pulse.waiting(ticket):
        return Flight(axis, ticket, verb(*args, group=axis.group, async_op=True))


def start_exchange(
    axis: Axis, operation: str, sent: Sequence[Tensor | None], received: Sequence[Tensor | None]
) -> Flight:
    """Take a ticket and start sending one tensor to, and receiving one from, each rank of the axis.

    Both lists are in axis order; None, and this rank's own entry, are skipped. All ranks call this
    together, with lists that fit.
    """
    me, n = axis.rank, axis.size
    to = [(me + k) % n for k in range(1, n)]
    source = [(me - k) % n for k in range(1, n)]
    pairs = [(dist.irecv, received[i], axis.ranks[i]) for i in source]
    pairs += [(dist.isend, sent[i], axis.ranks[i]) for i in to]
    calls = [(verb, x, peer) for verb, x, peer in pairs if x is not None and x.numel()]
    if axis.pulse is None:
        return Flight(axis, None, _exchange(calls, axis, axis.tag))
    ticket = axis.pulse.issue(axis.channel, axis.name, axis.ranks, operation)
    with axis.pulse.waiting(ticket):
        work = _exchange(calls, axis, axis.tag + ticket.number % _LAPS)
    axis.pulse.flying.add(work)  # a handle may be dropped: what arrives then needs its place
    return Flight(axis, ticket, work)


def _exchange(
    calls: list[tuple[Callable[..., dist.Work | None], Tensor, int]], axis: Axis, tag: int
) -> _Together:
    group = axis.group
    if axis.backend == "nccl":  # one launch: apart, two ranks that both send first never meet
        return _Together(dist.batch_isend_irecv([dist.P2POp(v, x, p, group) for v, x, p in calls]))
    return _Together([verb(x, peer, group=group, tag=tag) for verb, x, peer in calls])


def start_transfer(x: Tensor, axis: Axis, source: int, to: int, tag: int) -> Flight:
    """Take a ticket and start this rank's side of a transfer between two global ranks."""
    sends = axis.ranks[axis.rank] == source
    verb, peer = (dist.isend, to) if sends else (dist.irecv, source)
    if axis.pulse is None:
        return Flight(axis, None, verb(x, peer, group=axis.group, tag=tag))
    channel = f"{axis.name}:{source}>{to}#{tag}"
    operation = "send" if sends else "receive"
    ticket = axis.pulse.issue(channel, axis.name, (source, to), operation)
    with axis.pulse.waiting(ticket):
        return Flight(axis, ticket, verb(x, peer, group=axis.group, tag=tag))
