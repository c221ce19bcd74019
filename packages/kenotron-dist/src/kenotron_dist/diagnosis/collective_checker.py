"""Compare the calls of ranks before they communicate: ``KENOTRON_DEBUG=collectives``.

A rank posts each call before it starts it, and then looks at what others have posted under the
same number: of two that differ at least one sees the other, and starts nothing. No rank waits
there, so no order of calls that works without the comparison hangs with it. Where a rank would
block it first meets the posts of all; while it does it says where it stands, so that ranks that
wait for one another, or for one that has finished, are found in a second. A rank that computes
says nothing of the kind and is waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist

from kenotron_dist.diagnosis.collective_log import CollectiveLog
from kenotron_dist.diagnosis.divergence import (
    Call,
    Diverged,
    Link,
    Sites,
    Standing,
    circle_text,
    divergence,
    ended_text,
)
from kenotron_dist.in_flight import Entry, Pulse

T = TypeVar("T")
_SHORTEST, _LONGEST = 0.0005, 0.02
"""Pauses between two looks, in seconds."""
_LOOK = 0.25
"""Seconds between two looks for the reason of a wait."""
_ROUND = 2.0
"""Seconds to let the others come once two differ: with more calls the cause is more certain."""
_MEETING = 30.0
"""Seconds after which the backend waits: it detects dead peers."""


class CollectiveChecker:
    """Compares a rank's communications with its peers'. Made on all ranks.

    Arguments: what it listens to; this rank; the store that all ranks share. A context manager:
    leaving it, or ``close``, informs the others that this rank has finished, or failed.
    """

    def __init__(self, pulse: Pulse, rank: int, store: dist.Store) -> None:
        self._pulse, self._log = pulse, CollectiveLog(rank, store)
        self._sites: dict[str, Sites] = {}
        self._last: dict[str, dict[int, Call]] = {}
        pulse.listeners = (*pulse.listeners, self)

    def starting(self, entry: Entry, call: Callable[[], T]) -> Callable[[], T]:
        """Compare before ``call``, and again when what it starts is waited for."""
        return cast("Callable[[], T]", lambda: self._begin(entry, call))

    def fail(self, cause: str) -> None:
        """Who waits for the others gets a RuntimeError, as from a backend whose peer is lost."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it who would read
            self._log.fail(cause)

    def close(self) -> None:
        """Stop comparing; who waits for this rank learns that it has finished."""
        self._leave()
        self._log.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._leave()
        if not isinstance(error, Diverged):  # the others have it
            self.fail(f"rank {self._log.rank} has ended ({type(error).__name__}: {error})")

    def _leave(self) -> None:
        self._pulse.listeners = tuple(x for x in self._pulse.listeners if x is not self)

    def _begin(self, entry: Entry, call: Callable[[], Any]) -> Any:
        meeting = _Meeting(self._log, entry, self._apart)
        meeting.look()
        if _blocks(entry):
            return _Compared(self, meeting, self.meet(meeting, call))
        return _Compared(self, meeting, self._guarded(call))

    def meet(self, meeting: _Meeting, block: Callable[[], T]) -> T:
        """Wait for the others, then let the backend block. Raises Diverged."""
        try:
            self._wait(meeting)
            return self._guarded(block)
        finally:
            meeting.leave()

    def _wait(self, meeting: _Meeting) -> None:
        began = looked = time.monotonic()
        before: tuple[Link, ...] = ()
        pause = _SHORTEST
        while not meeting.look():
            now = time.monotonic()
            if now - began > _MEETING:
                return
            if now - looked > _LOOK:
                looked, before = now, self._judge(meeting, before)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        ticket = meeting.entry.ticket
        self._sites.setdefault(ticket.channel, Sites()).note(ticket.number, meeting.calls)
        self._last[ticket.channel] = meeting.calls
        self._log.erase(ticket.channel, meeting.low)

    def _judge(self, meeting: _Meeting, before: tuple[Link, ...]) -> tuple[Link, ...]:
        """Look for the reason of a long wait; a circle that stands through three looks is true."""
        log = self._log
        if found := log.divergence():
            raise Diverged(found)
        if failed := log.failed():
            raise RuntimeError(failed)
        here = meeting.stand()
        if ended := log.ended(here):
            text = ended_text(log.rank, here, ended, self._last.get(here.channel, {}))
            raise Diverged(log.report(text + self._apart(here.channel)))
        circle = log.circle()
        if circle and _same(circle, before) and _same(circle, log.circle()):
            channels = dict.fromkeys(link.standing.channel for link in circle)
            raise Diverged(log.report(circle_text(circle) + self._apart(*channels)))
        return circle

    def _apart(self, *channels: str) -> str:
        """The lines at which the ranks of some channels came apart."""
        known = {c: str(self._sites[c]) for c in channels if c in self._sites}
        apart = "; ".join(f"on {channel} {sites}" for channel, sites in known.items() if sites)
        return f". They made the same calls from different lines: {apart}" if apart else ""

    def _guarded(self, call: Callable[[], T]) -> T:
        """Call it; the backend's error is a divergence if there was one."""
        try:
            return call()
        except RuntimeError as error:
            if found := self._log.divergence():
                raise Diverged(found) from error
            raise


class _Meeting:
    """One communication of this rank: who has come, and whether they call the same."""

    def __init__(self, log: CollectiveLog, entry: Entry, apart: Callable[[str], str]) -> None:
        self._log, self.entry, self._apart = log, entry, apart
        self.calls: dict[int, Call] = {}
        self.low = entry.ticket.number
        """The first number of the channel that some rank had not done with."""
        self._standing: Standing | None = None
        log.post(entry)

    def look(self) -> bool:
        """Compare with those that have come; whether these are all. Raises Diverged."""
        ticket = self.entry.ticket
        end = None
        while True:
            for rank in ticket.ranks:
                found = None if rank in self.calls else self._log.read(self.entry, rank)
                if found is not None:
                    self.low, self.calls[rank] = min(self.low, found[0]), found[1]
            all_here = len(self.calls) == len(ticket.ranks)
            text = divergence(ticket.channel, ticket.number, ticket.ranks, self.calls)
            if not text:
                return all_here
            end = time.monotonic() + _ROUND if end is None else end
            found = self._log.divergence()
            if found or all_here or time.monotonic() > end:
                raise Diverged(found or self._log.report(text + self._apart(ticket.channel)))
            time.sleep(_LONGEST)

    def stand(self) -> Standing:
        """Publish that this rank waits here, if it has not. Returns what it published."""
        if self._standing is None:
            self._standing = self._log.stand(self.entry)
        return self._standing

    def leave(self) -> None:
        """It waits here no longer."""
        if self._standing is not None:
            self._log.leave(self._standing)
            self._standing = None

    def done(self) -> None:
        """Nothing of it is needed any more."""
        self._log.done(self.entry)


class _Compared:
    """A work of the backend that is compared before it is waited for."""

    def __init__(self, checker: CollectiveChecker, meeting: _Meeting, work: Any) -> None:
        self._checker, self._meeting, self._work = checker, meeting, work
        self._waited = False

    def wait(self) -> object:
        """Meet the others and block until it is done. Raises Diverged."""
        if self._work is None:
            return None
        found = self._checker.meet(self._meeting, self._work.wait)
        if not self._waited:
            self._waited = True
            self._meeting.done()
        return found

    def is_completed(self) -> bool:
        """Whether the communication is done."""
        return self._work is None or self._work.is_completed()


def _blocks(entry: Entry) -> bool:
    """Whether starting it blocks until all have come, where ranks cannot be compared."""
    checked = entry.whole and dist.get_debug_level() == dist.DebugLevel.DETAIL
    return checked or entry.makes_group


def _same(one: tuple[Link, ...], other: tuple[Link, ...]) -> bool:
    def who(links: tuple[Link, ...]) -> list[tuple[int, int]]:
        return [(link.rank, link.standing.version) for link in links]

    return who(one) == who(other)
