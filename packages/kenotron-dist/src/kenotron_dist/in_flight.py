"""Communications in flight in this process, kept to explain a hang.

Every verb of ``collectives`` takes a ticket when it is issued and shows it while it waits: a few
microseconds, which is all a healthy run pays. The ``Watchdog`` reads it from its own thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from kenotron_dist.device import Mark
from kenotron_dist.ranks import listed

T = TypeVar("T")
_OWN = (str(Path(__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_STANDARD = str(Path(threading.__file__).parent) + os.sep


class Ticket(NamedTuple):
    """One communication of this process."""

    channel: str
    """Participants: the same text on all of them (``tp:0,1``; ``pp:0>1#4`` for a transfer)."""
    axis: str
    """Name of the mesh axis."""
    ranks: tuple[int, ...]
    """Global ranks that must come together."""
    number: int
    """Number of communications issued by this process on the channel, this one included."""
    operation: str
    file: str
    """Path of the calling code, outside this package and torch."""
    line: int

    @property
    def site(self) -> str:
        """``file.py:line`` of the calling code."""
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        who = listed(self.ranks)
        return f"{self.operation} #{self.number} over {self.axis} ({who}), called at {self.site}"


class Entry(NamedTuple):
    """One communication in full, for those who listen (``CallsInFlight.listeners``)."""

    ticket: Ticket
    how: str
    """Value that all must agree on next to the operation: ``sum``, ``from 0``, ``by 1``; or
    empty."""
    dtype: str
    """``float32``; empty where nothing is communicated."""
    shape: tuple[int, ...]
    """Of the tensor that was given; of several together, their number of elements."""
    sent: int
    """Bytes that leave this rank (counted by ``message_size``)."""
    gives: tuple[int, ...] | None = None
    """Bytes for each of ``ticket.ranks``, where they need not be the same for all."""
    takes: tuple[int, ...] | None = None
    """Bytes expected from each of them."""
    makes_group: bool = False
    """True where ranks make a group; a set of transfers without data, too, has no dtype."""


class Waiting(NamedTuple):
    """A ticket that this process is blocked on; compared by identity."""

    ticket: Ticket
    since: float
    """``time.monotonic()`` when the wait began."""
    on_device: bool = False
    """The device waits, not the process: other work may be queued before the communication."""


class CallsInFlight:
    """Counters and open waits of one process; written by its threads, read by the watchdog's."""

    def __init__(self) -> None:
        self.tickets: dict[str, Ticket] = {}
        """The latest ticket of each channel; its number is the channel's count."""
        self.last: Ticket | None = None
        self.moved = time.monotonic()
        """Time at which something was last issued or a wait ended."""
        self.on_error: Callable[[Ticket, RuntimeError], RuntimeError] | None = None
        self.ended = threading.Event()
        """Set when the mesh is closed: ends threads that work for it."""
        self.watched = False
        """True where a watchdog reads what the device still has to do."""
        self.waited = 0.0
        """Seconds that the thread that made this was blocked in communication, all in all."""
        self._thread = threading.get_ident()
        self.listeners: tuple[Callable[[Entry], None], ...] = ()
        """Called before every communication: recorders. While empty, no entry is made."""
        self.doing = ""
        """Long work outside communication that others may wait for; empty when there is none."""
        self.flying: set[object] = set()
        """Exchanges that were not waited for yet: their buffers must outlive them."""
        self.shown: dict[int, Waiting] = {}
        """Communication that each thread is blocked on."""
        self._queued: deque[tuple[Waiting, Mark]] = deque()
        self._quiet: dict[str, bool] = {}

    def issue(
        self,
        channel: str,
        axis: str,
        ranks: tuple[int, ...],
        operation: str,
        site: tuple[str, int] | None = None,
    ) -> Ticket:
        """Count a communication that starts now; ``site`` is who calls, if that is known."""
        before = self.tickets.get(channel)
        number = 1 if before is None else before.number + 1
        ticket = Ticket(channel, axis, ranks, number, operation, *(site or self.call_site()))
        self.tickets[channel] = self.last = ticket
        return ticket

    def announce(self, entry: Entry) -> None:
        """Call all listeners, before the communication starts."""
        for listener in self.listeners:
            listener(entry)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Count and announce nothing of what happens within: it is that of ranks which are not."""
        tickets, last, listeners = dict(self.tickets), self.last, self.listeners
        self.listeners = ()
        try:
            yield
        finally:
            self.tickets, self.last, self.listeners = tickets, last, listeners

    def wait(self, ticket: Ticket, block: Callable[[], T]) -> T:
        """Show ``ticket`` while ``block`` is called; a RuntimeError leaves it explained."""
        thread = threading.get_ident()
        began = time.monotonic()
        self.shown[thread] = Waiting(ticket, began)
        try:
            return block()
        except RuntimeError as error:
            raise self.explain(ticket, error) from error
        finally:
            del self.shown[thread]
            self.moved = time.monotonic()
            if thread == self._thread:
                self.waited += self.moved - began

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """A context of long uneven work (writing a file): peers that wait are not reported.

        A rank that dies in it is still reported; one that never ends it is not.
        """
        self.doing, before = doing, self.doing
        try:
            yield
        finally:
            self.doing = before

    def queued(self, ticket: Ticket, mark: Callable[[], Mark]) -> None:
        """Note that the device waits for a communication, and this process did not.

        Args:
            ticket: the communication.
            mark: marks the present end of the device's queue, after that wait; called only where
                there is a watchdog.
        """
        if self.watched:
            self._queued.append((Waiting(ticket, time.monotonic(), on_device=True), mark()))

    def waits(self) -> list[Waiting]:
        """List what this process, or its device, is blocked on, the oldest first."""
        while self._queued and self._queued[0][1].is_completed():
            self._queued.popleft()
        device = [self._queued[0][0]] if self._queued else []
        return sorted([*self.shown.values(), *device], key=lambda wait: wait.since)

    def explain(self, ticket: Ticket, error: RuntimeError) -> RuntimeError:
        """The backend's error with the operation, the ranks and the calling line in words."""
        if self.on_error is not None:
            return self.on_error(ticket, error)
        return RuntimeError(f"{ticket}, failed: {error}")

    def call_site(self) -> tuple[str, int]:
        """File and line of the innermost caller that is not this package, torch or Python's."""
        frame = sys._getframe(2)
        while frame.f_back is not None and self._is_quiet(frame.f_code.co_filename):
            frame = frame.f_back
        return frame.f_code.co_filename, frame.f_lineno

    def _is_quiet(self, file: str) -> bool:
        quiet = self._quiet.get(file)
        if quiet is None:
            standard = file.startswith(_STANDARD) and "site-packages" not in file
            quiet = file.startswith((*_OWN, "<frozen ")) or standard
            self._quiet[file] = quiet
        return quiet
