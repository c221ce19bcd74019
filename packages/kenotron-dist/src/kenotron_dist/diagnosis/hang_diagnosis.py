"""Find the first cause of a stall from the beats of the ranks.

Pure: the ``Watchdog`` collects the beats, this file reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from kenotron_dist.in_flight import Ticket

KINDS = ("failed", "silent", "store", "left", "mismatch", "absent", "deadlock", "joined")
"""Kinds of a first cause, the plainest first.

``failed``: it ended with an exception. ``silent``: its heartbeat stands still, so it is stopped or
dead. ``store``: the store that ranks meet at is gone. ``left``: it closed its watchdog and will
not come. ``mismatch``: it entered another operation. ``absent``: it computes, or waits outside this
package. ``deadlock``: ranks wait for one another. ``joined``: no rank is missing, so the transfer
itself stands still.
"""


class Beat(NamedTuple):
    """State that a rank publishes of itself every interval."""

    number: int
    """Counts the beats."""
    counts: dict[str, int]
    """Communications issued, by channel."""
    waits: tuple[tuple[Ticket, float], ...]
    """Operations it is blocked on and for how many seconds, the oldest first."""
    last: Ticket | None
    """The communication it issued last."""
    idle: float
    """Seconds since it last issued one or stopped waiting."""
    ended: str = ""
    """End of the rank: ``finished``, or its exception. Empty while it lives."""
    doing: str = ""
    """Long work that it has declared and that others must bear."""

    def encode(self) -> str:
        """As JSON text."""
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str | bytes) -> Beat:
        """Undo ``encode``."""
        number, counts, waits, last, idle, *words = json.loads(text)
        shown = tuple((_ticket(ticket), float(seconds)) for ticket, seconds in waits)
        return cls(number, counts, shown, _ticket(last) if last else None, idle, *words)


class Seen(NamedTuple):
    """A rank's latest beat, as another rank saw it."""

    beat: Beat | None
    changed: float
    """Time at which it was new; until it has moved, that at which it was first looked for."""
    moves: int
    """Number of new beats seen after the first."""


@dataclass(frozen=True)
class Cause:
    """The first cause of a stall."""

    rank: int | None
    """The rank to look at; None when there is not just one."""
    kind: str
    """One of ``KINDS``."""
    reason: str
    """In words."""

    def encode(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Cause:
        """Undo ``encode``."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class StallReport:
    """A rank waits in vain, and why."""

    rank: int
    """The waiting rank: the one that reports."""
    ticket: Ticket
    """Communication that it waits in: operation, axis, ranks, calling line."""
    seconds: float
    """Seconds that it has waited."""
    cause: Cause

    def __str__(self) -> str:
        return f"rank {self.rank} waits {self.seconds:.1f} s in {self.ticket}: {self.cause.reason}"


class PeerLost(RuntimeError):
    """A communication failed because of another rank, which is named."""

    def __init__(self, report: StallReport, error: str) -> None:
        super().__init__(f"{report.cause.reason}; so {report.ticket}, failed: {error}")
        self.report = report

    @property
    def rank(self) -> int | None:
        """The rank that was lost first."""
        return self.report.cause.rank


class Search(NamedTuple):
    """State of the search for a first cause."""

    causes: list[Cause]
    """All possible causes, the plainest first."""
    unsure: frozenset[int]
    """Ranks whose beats are needed before another cause than silence is named."""

    @property
    def verdict(self) -> Cause | None:
        """The first cause, or None as long as it is not certain."""
        if not self.causes or (self.unsure and self.causes[0].kind not in ("failed", "silent")):
            return None
        return self.causes[0]


class _Step(NamedTuple):
    rank: int
    ticket: Ticket
    behind: int
    """Number of ranks it waits for."""


class Inquiry:
    """Follows waits from one rank to the next until it meets a rank that waits for none.

    Args:
        seen: last known state of each rank.
        now: the time.
        patience: seconds of silence that count as death.
        fresh: time before which beats prove nothing.
        failed: the communication has failed already: a rank may have left after it joined.
    """

    def __init__(
        self,
        seen: Mapping[int, Seen],
        now: float,
        patience: float,
        fresh: float,
        failed: bool = False,
    ) -> None:
        self._seen, self._now, self._patience, self._fresh = seen, now, patience, fresh
        self._failed = failed
        self._causes: list[Cause] = []
        self._unsure: set[int] = set()
        self._visited: set[tuple[int, str]] = set()

    def search(self, rank: int, ticket: Ticket) -> Search:
        """Find who keeps ``rank`` waiting in ``ticket``."""
        self._visit(rank, ticket, ())
        causes = self._causes
        if not causes and not self._unsure:
            reason = f"all ranks have joined {ticket}, but the transfer stands still"
            causes = [Cause(None, "joined", reason)]
        order = {kind: i for i, kind in enumerate(KINDS)}
        return Search(sorted(causes, key=lambda c: order[c.kind]), frozenset(self._unsure))

    def _visit(self, rank: int, ticket: Ticket, path: tuple[_Step, ...]) -> None:
        if (rank, ticket.channel) in self._visited:
            return
        self._visited.add((rank, ticket.channel))
        behind: list[tuple[int, Beat]] = []
        entered = {rank: ticket}
        for peer in ticket.ranks:
            beat = self._hear(peer) if peer != rank else None
            if beat is None:
                continue
            joined = beat.counts.get(ticket.channel, 0) >= ticket.number
            if beat.ended and (self._failed or not joined):
                kind = "left" if beat.ended == "finished" else "failed"
                self._add(peer, kind, f"has ended ({beat.ended})")
            elif not joined:
                behind.append((peer, beat))
            elif beat.waits and beat.waits[0][0].number == ticket.number:
                if beat.waits[0][0].channel == ticket.channel:
                    entered[peer] = beat.waits[0][0]
        self._compare(entered)
        path = (*path, _Step(rank, ticket, len(behind)))
        for peer, beat in behind:
            if any(step.rank == peer for step in path):
                self._causes.append(_circle(path, peer))
            elif beat.waits:
                self._visit(peer, beat.waits[0][0], path)
            elif beat.doing:
                self._unsure.add(peer)
            else:
                self._add(peer, "absent", f"has not joined {ticket}: {_whereabouts(beat)}")

    def _hear(self, peer: int) -> Beat | None:
        """The peer's beat if it proves something; otherwise what that shows is noted."""
        seen = self._seen.get(peer)
        if seen is None:
            self._unsure.add(peer)
            return None
        if seen.beat is not None and seen.beat.ended:
            return seen.beat
        silence = self._now - seen.changed
        if silence > self._patience:
            place = f", last seen {_place(seen.beat)}" if seen.beat else " and never beat"
            reason = f"is stopped or dead: its heartbeat stands still for {silence:.1f} s{place}"
            self._add(peer, "silent", reason)
            return None
        if seen.beat is None or not seen.moves or seen.changed < self._fresh:
            self._unsure.add(peer)
            return None
        return seen.beat

    def _compare(self, entered: Mapping[int, Ticket]) -> None:
        """Ranks that meet must do the same; the one that does not is the cause."""
        by_operation: dict[str, list[int]] = {}
        for rank, ticket in entered.items():
            by_operation.setdefault(ticket.operation, []).append(rank)
        if len(by_operation) < 2 or {*by_operation} == {"send", "receive"}:
            return
        lone = [ranks[0] for ranks in by_operation.values() if len(ranks) == 1]
        odd = lone[0] if len(lone) == 1 else None
        reason = "ranks entered different operations: " + "; ".join(
            f"rank {rank} {ticket}" for rank, ticket in sorted(entered.items())
        )
        if odd is not None:
            reason = f"rank {odd} alone entered {entered[odd].operation}: {reason}"
        self._causes.append(Cause(odd, "mismatch", reason))

    def _add(self, rank: int, kind: str, what: str) -> None:
        self._causes.append(Cause(rank, kind, f"rank {rank} {what}"))


def _circle(path: tuple[_Step, ...], last: int) -> Cause:
    """Ranks that wait for one another; where all but one have come, that one is the cause."""
    start = next(i for i, step in enumerate(path) if step.rank == last)
    circle = path[start:]
    waits = "; ".join(f"rank {step.rank} in {step.ticket}" for step in circle)
    awaited = [step.rank for step in (*circle[1:], circle[0])]  # by each of the circle
    lone = [
        rank
        for rank, step in zip(awaited, circle, strict=True)
        if step.behind == 1 and len(step.ticket.ranks) > 2
    ]
    reason = f"ranks wait for one another: {waits}"
    if len(lone) == 1:
        reason = f"rank {lone[0]} alone has not come where it is awaited: {reason}"
    return Cause(lone[0] if len(lone) == 1 else None, "deadlock", reason)


def _whereabouts(beat: Beat) -> str:
    since = f", since {beat.last}" if beat.last else ""
    return f"it has called nothing for {beat.idle:.1f} s{since}"


def _place(beat: Beat) -> str:
    if beat.waits:
        return f"waiting in {beat.waits[0][0]}"
    return f"after {beat.last}" if beat.last else "before its first communication"


def _ticket(fields: list) -> Ticket:
    channel, axis, ranks, *rest = fields
    return Ticket(channel, axis, tuple(ranks), *rest)
