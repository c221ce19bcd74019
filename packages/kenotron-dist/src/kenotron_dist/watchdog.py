"""Names the rank that keeps the others waiting, instead of hanging until a timeout.

Every rank writes a beat to the store: what it has issued, what it is blocked on. A rank that has
waited in one communication longer than the limit reads the beats of those it waits for, follows
their waits to the first cause, and reports it. Nobody waits, nothing is reported, however long
the ranks compute.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist

from kenotron_dist.board import Board
from kenotron_dist.leave import leave
from kenotron_dist.mesh import Mesh
from kenotron_dist.pulse import Ticket, Waiting
from kenotron_dist.spawn import STALLED
from kenotron_dist.stall import Beat, Cause, Inquiry, PeerLost, Search, Seen, StallReport

_BEAT_SECONDS = 1.5
"""Longest time between two beats."""
_LEAST_PATIENCE = 1.0
"""A shorter silence, in seconds, may be a busy machine."""


def leave_stalled(report: StallReport) -> None:
    """Write the report to stderr in one line and end this process with code ``STALLED``."""
    sys.stderr.write(f"{report}\n")
    leave(STALLED)


def watch(
    mesh: Mesh,
    store: dist.Store | None = None,
    *,
    limit: timedelta,
    on_stall: Callable[[StallReport], None] = leave_stalled,
) -> Watchdog:
    """Start a watchdog over the communications of ``mesh``. Called alike on every rank.

    Arguments: the mesh; a store that all ranks share (default: that of the process group; a clone
    is used, so that nobody waits for the watchdog); how long a rank may wait in one communication,
    longer than the longest uneven work between two of them; what to do with a report, called in
    the watchdog's thread (a blocked wait cannot be interrupted, so the default ends the process).

    Every waiting rank reports within 10 seconds of the limit. Until it is closed, a wait that
    fails raises PeerLost, which names the rank that was lost first, where that can be told.

    Raises ValueError when the limit is not positive.
    """
    if limit <= timedelta(0):
        raise ValueError(f"watch: limit {limit} is not positive: give the longest bearable wait")
    if store is None and mesh.config.world_size > 1:
        store = dist.distributed_c10d._get_default_store()
    return Watchdog(mesh, store, limit.total_seconds(), on_stall)


class Watchdog:
    """Two threads that beat and look for stalls until ``close``. A context manager.

    Leaving the context with an exception tells the other ranks that this one failed, and why.
    """

    def __init__(
        self,
        mesh: Mesh,
        store: dist.Store | None,
        limit: float,
        on_stall: Callable[[StallReport], None],
    ) -> None:
        self._rank, self._pulse, self._limit, self._on_stall = (
            mesh.rank,
            mesh.pulse,
            limit,
            on_stall,
        )
        self._interval = min(limit / 4, _BEAT_SECONDS)
        self._patience = max(3 * self._interval, _LEAST_PATIENCE)
        self._ended = ""
        self._failing = False
        self._reported: Waiting | None = None
        self._claimed: Cause | None = None
        self._stop = threading.Event()
        self._board: Board | None = None
        if mesh.config.world_size > 1 and store is not None:
            times = store.add(f"kenotron-watchdog/{self._rank}", 1)
            clone = getattr(store, "clone", lambda: store)  # torch's stubs do not know it
            own = dist.PrefixStore(f"kenotron-watchdog/{times}", clone())
            self._board = Board(own, self._rank, self._interval, self._beat)
            self._pulse.watched, self._pulse.on_error = True, self._explain
            self._thread = threading.Thread(
                target=self._run, args=(self._board,), name="kenotron-watchdog", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop watching. Other ranks know from now on that this one has ended."""
        board, self._board = self._board, None
        self._ended = self._ended or "finished"
        self._stop.set()
        if board is not None:
            self._pulse.on_error, self._pulse.watched = None, False
            board.close(self._patience)
            if threading.current_thread() is not self._thread:
                self._thread.join(self._patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            text = str(error).partition("\n")[0]
            self._ended = f"{type(error).__name__}: {text}"
            if self._board is not None and not isinstance(error, PeerLost):
                reason = f"rank {self._rank} has ended ({self._ended})"
                self._board.claim(Cause(self._rank, "failed", reason))
        self.close()

    def _beat(self, number: int) -> Beat:
        now = time.monotonic()
        pulse = self._pulse
        counts = {channel: ticket.number for channel, ticket in dict(pulse.tickets).items()}
        waits = tuple((wait.ticket, now - wait.since) for wait in pulse.waits())
        idle = now - pulse.moved
        return Beat(number, counts, waits, pulse.last, idle, self._ended, pulse.doing)

    def _run(self, board: Board) -> None:
        while not self._stop.wait(self._interval / 2):
            if self._failing:
                continue  # the waiting thread asks the board
            waits = self._pulse.waits()
            now = time.monotonic()
            if self._claimed is not None and not self._is_open(self._reported, waits):
                board.withdraw(self._claimed)  # it went on after all
                self._claimed = None
            if not waits or now - waits[0].since < self._interval:
                board.ask(())
            elif waits[0] is not self._reported:
                self._look(board, waits[0], now - waits[0].since)

    def _look(self, board: Board, wait: Waiting, seconds: float) -> None:
        """Follow one wait; report it when it is too long, or when its cause is known already."""
        over = seconds >= self._limit
        if not over and board.cause is None and seconds < self._limit / 2:
            return
        fresh = wait.since + (self._limit if over else 0.0)
        search = self._search(board, wait.ticket, fresh)
        found, standing = search.verdict, board.cause
        if standing is not None and (over or (found and _same(found, standing))):
            self._report(board, wait, standing)
        elif over and found is not None and not (found.kind == "joined" and wait.on_device):
            self._report(board, wait, found)

    def _report(self, board: Board, wait: Waiting, cause: Cause) -> None:
        """Let all waiting ranks learn the cause, which ends with the first of them; then tell."""
        if board.cause is None and not board.broken:
            board.claim(cause)
            self._claimed = cause
        self._stop.wait(2 * self._interval)
        if not self._stop.is_set() and self._is_open(wait, self._pulse.waits()):
            self._reported = wait
            seconds = time.monotonic() - wait.since
            first = board.cause or cause
            self._on_stall(StallReport(self._rank, wait.ticket, seconds, first))

    def _is_open(self, wait: Waiting | None, waits: Iterable[Waiting]) -> bool:
        return not self._failing and any(wait is other for other in waits)

    def _search(self, board: Board, ticket: Ticket, fresh: float, failed: bool = False) -> Search:
        """Ask for those that may be to blame, and judge by what is known of them now."""
        now = time.monotonic()
        if board.broken or now - board.answered > self._patience + 2 * self._interval:
            return Search([_lost_store(board, now)], frozenset())
        seen = {**board.seen, self._rank: Seen(self._beat(0), now, 1)}
        search = Inquiry(seen, now, self._patience, fresh, failed).search(self._rank, ticket)
        board.ask({*ticket.ranks, *board.seen, *search.unsure})
        return search

    def _explain(self, ticket: Ticket, error: RuntimeError) -> RuntimeError:
        """The error of a failed wait, told by its first cause. Runs in the waiting thread."""
        board, began = self._board, time.monotonic()
        plain = RuntimeError(f"{ticket}, failed: {error}")
        if board is None:
            return plain
        self._failing = True
        try:
            cause = self._first_cause(board, ticket, began)
        finally:
            self._failing = False
        if cause is None:
            return plain
        seconds = time.monotonic() - began
        told = str(error).partition("\n")[0]
        return PeerLost(StallReport(self._rank, ticket, seconds, cause), told)

    def _first_cause(self, board: Board, ticket: Ticket, began: float) -> Cause | None:
        """Wait until a heartbeat is seen standing still, or all are seen beating."""
        end = began + self._patience + 4 * self._interval
        claimed: Cause | None = None
        while time.monotonic() < end:
            if board.cause is not None:
                return board.cause
            if claimed is None:
                found = self._search(board, ticket, began, failed=True).verdict
                if found is not None and found.kind == "joined":
                    return None  # everybody is alive and has come
                if found is not None and board.broken:
                    return found
                if found is not None:
                    claimed = found
                    board.claim(found)
            time.sleep(self._interval / 8)
        return claimed


def _same(one: Cause, other: Cause) -> bool:
    return one.rank == other.rank and (one.rank is not None or one.kind == other.kind)


def _lost_store(board: Board, now: float) -> Cause:
    how = board.broken or f"no answer for {now - board.answered:.1f} s"
    reason = (
        "the store that ranks meet at is gone, so the process that hosts it is stopped or dead: "
        f"rank 0, unless the launcher hosts it ({how})"
    )
    return Cause(0, "store", reason)
