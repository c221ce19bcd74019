"""Name the rank that keeps the others waiting, instead of hanging until a timeout.

Every rank writes a beat to the store: what it has issued, what it is blocked on. A rank that has
waited in one communication longer than the limit reads the beats of those it waits for, follows
their waits to the first cause, and reports it. While no rank waits, nothing is reported, however
long the ranks compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from kenotron_dist.device import bind_thread
from kenotron_dist.diagnosis.hang_diagnosis import (
    Beat,
    Cause,
    Inquiry,
    PeerLost,
    Search,
    Seen,
    StallReport,
)
from kenotron_dist.diagnosis.heartbeat import Heartbeat
from kenotron_dist.exit_process import STALLED, leave
from kenotron_dist.in_flight import Ticket, Waiting
from kenotron_dist.launch import signing_key
from kenotron_dist.mesh import Mesh
from kenotron_dist.signed_store import SignedStore, own_connection

_BEAT_SECONDS = 1.5
"""Longest time between two beats."""
_LEAST_PATIENCE = 1.0
"""A shorter silence, in seconds, may be a busy machine."""


def leave_stalled(report: StallReport) -> None:
    """Write the report to stderr in one line and end this process with code ``STALLED``."""
    leave(STALLED, str(report))


def watch(
    mesh: Mesh,
    store: dist.Store | None = None,
    *,
    limit: timedelta,
    on_stall: Callable[[StallReport], None] = leave_stalled,
) -> Watchdog:
    """Start a watchdog over the communications of ``mesh``. Call it on every rank.

    Every waiting rank reports within 10 seconds of the limit. Until it is closed, a wait that
    fails raises PeerLost, which names the rank that was lost first, where that is known.

    Args:
        mesh: the mesh.
        store: shared by all ranks (default: that of the process group); a clone is used, so that no
            rank waits for the watchdog.
        limit: of a wait in one communication, longer than the longest uneven work between two.
        on_stall: called with the report in the watchdog's thread (a blocked wait cannot be
            interrupted, so the default ends the process).

    Raises:
        ValueError: the limit is not positive.
    """
    if limit <= timedelta(0):
        raise ValueError(f"watch: limit {limit} is not positive: give the longest bearable wait")
    if store is None and mesh.config.world_size > 1:
        store = dist.distributed_c10d._get_default_store()
    return Watchdog(mesh, store, limit.total_seconds(), on_stall)


class Watchdog:
    """Two threads that beat and look for stalls until ``close``. A context manager.

    Leaving the context with an exception informs the other ranks that this one failed, and why.
    """

    def __init__(
        self,
        mesh: Mesh,
        store: dist.Store | None,
        limit: float,
        on_stall: Callable[[StallReport], None],
    ) -> None:
        self._rank, self._pulse, self._device = mesh.rank, mesh.pulse, mesh.device
        self._limit, self._on_stall = limit, on_stall
        self._interval = min(limit / 4, _BEAT_SECONDS)
        self._patience = max(3 * self._interval, _LEAST_PATIENCE)
        self._ended = ""
        self._failing = False
        self._reported: Waiting | None = None
        self._claimed: Cause | None = None
        self._stop = threading.Event()
        self._heartbeat: Heartbeat | None = None
        if mesh.config.world_size > 1 and store is not None:
            times = store.add(f"kenotron-watchdog/{self._rank}", 1)
            prefix = f"kenotron-watchdog/{times}"
            own = SignedStore(own_connection(store), prefix, signing_key())
            self._heartbeat = Heartbeat(own, self._rank, self._interval, self._beat, mesh.device)
            self._pulse.watched, self._pulse.on_error = True, self._explain
            self._thread = threading.Thread(
                target=self._run, args=(self._heartbeat,), name="kenotron-watchdog", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop watching. Other ranks see from now on that this one has ended."""
        heartbeat, self._heartbeat = self._heartbeat, None
        self._ended = self._ended or "finished"
        self._stop.set()
        if heartbeat is not None:
            self._pulse.on_error, self._pulse.watched = None, False
            heartbeat.close(self._patience)
            if threading.current_thread() is not self._thread:
                self._thread.join(self._patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            text = str(error).partition("\n")[0]
            self._ended = f"{type(error).__name__}: {text}"
            if self._heartbeat is not None and not isinstance(error, PeerLost):
                reason = f"rank {self._rank} has ended ({self._ended})"
                self._heartbeat.claim(Cause(self._rank, "failed", reason))
        self.close()

    def _beat(self, number: int) -> Beat:
        now = time.monotonic()
        pulse = self._pulse
        counts = {channel: ticket.number for channel, ticket in dict(pulse.tickets).items()}
        waits = tuple((wait.ticket, now - wait.since) for wait in pulse.waits())
        idle = now - pulse.moved
        return Beat(number, counts, waits, pulse.last, idle, self._ended, pulse.doing)

    def _run(self, heartbeat: Heartbeat) -> None:
        bind_thread(self._device)
        while not self._stop.wait(self._interval / 2):
            if self._failing:
                continue  # the waiting thread asks the heartbeat
            waits = self._pulse.waits()
            now = time.monotonic()
            if self._claimed is not None and not self._is_open(self._reported, waits):
                heartbeat.withdraw(self._claimed)  # it went on after all
                self._claimed = None
            if not waits or now - waits[0].since < self._interval:
                heartbeat.ask(())
            elif waits[0] is not self._reported:
                self._look(heartbeat, waits[0], now - waits[0].since)

    def _look(self, heartbeat: Heartbeat, wait: Waiting, seconds: float) -> None:
        """Follow one wait; report it when it is too long, or when its cause is known already."""
        over = seconds >= self._limit
        if not over and heartbeat.cause is None and seconds < self._limit / 2:
            return
        fresh = wait.since + (self._limit if over else 0.0)
        search = self._search(heartbeat, wait.ticket, fresh)
        found, standing = search.verdict, heartbeat.cause
        if standing is not None and (over or (found and _same(found, standing))):
            self._report(heartbeat, wait, standing)
        elif over and found is not None and not (found.kind == "joined" and wait.on_device):
            self._report(heartbeat, wait, found)

    def _report(self, heartbeat: Heartbeat, wait: Waiting, cause: Cause) -> None:
        """Publish the cause; after two intervals report the first that was published."""
        if heartbeat.cause is None and not heartbeat.broken:
            heartbeat.claim(cause)
            self._claimed = cause
        self._stop.wait(2 * self._interval)
        if not self._stop.is_set() and self._is_open(wait, self._pulse.waits()):
            self._reported = wait
            seconds = time.monotonic() - wait.since
            first = heartbeat.cause or cause
            self._on_stall(StallReport(self._rank, wait.ticket, seconds, first))

    def _is_open(self, wait: Waiting | None, waits: Iterable[Waiting]) -> bool:
        return not self._failing and any(wait is other for other in waits)

    def _search(
        self, heartbeat: Heartbeat, ticket: Ticket, fresh: float, failed: bool = False
    ) -> Search:
        """Read the beats of the possible causes, and judge by them."""
        now = time.monotonic()
        if heartbeat.broken or now - heartbeat.answered > self._patience + 2 * self._interval:
            return Search([_lost_store(heartbeat, now)], frozenset())
        seen = {**heartbeat.seen, self._rank: Seen(self._beat(0), now, 1)}
        search = Inquiry(seen, now, self._patience, fresh, failed).search(self._rank, ticket)
        heartbeat.ask({*ticket.ranks, *heartbeat.seen, *search.unsure})
        return search

    def _explain(self, ticket: Ticket, error: RuntimeError) -> RuntimeError:
        """The error of a failed wait, with its first cause. Runs in the waiting thread."""
        heartbeat, began = self._heartbeat, time.monotonic()
        plain = RuntimeError(f"{ticket}, failed: {error}")
        if heartbeat is None:
            return plain
        self._failing = True
        try:
            cause = self._first_cause(heartbeat, ticket, began)
        finally:
            self._failing = False
        if cause is None:
            return plain
        seconds = time.monotonic() - began
        first_line = str(error).partition("\n")[0]
        return PeerLost(StallReport(self._rank, ticket, seconds, cause), first_line)

    def _first_cause(self, heartbeat: Heartbeat, ticket: Ticket, began: float) -> Cause | None:
        """Wait until a heartbeat is seen standing still, or all are seen beating."""
        end = began + self._patience + 4 * self._interval
        claimed: Cause | None = None
        while time.monotonic() < end:
            if heartbeat.cause is not None:
                return heartbeat.cause
            if claimed is None:
                found = self._search(heartbeat, ticket, began, failed=True).verdict
                if found is not None and found.kind == "joined":
                    return None  # everybody is alive and has come
                if found is not None and heartbeat.broken:
                    return found
                if found is not None:
                    claimed = found
                    heartbeat.claim(found)
            time.sleep(self._interval / 8)
        return claimed


def _same(one: Cause, other: Cause) -> bool:
    return one.rank == other.rank and (one.rank is not None or one.kind == other.kind)


def _lost_store(heartbeat: Heartbeat, now: float) -> Cause:
    how = heartbeat.broken or f"no answer for {now - heartbeat.answered:.1f} s"
    reason = (
        "the store that ranks meet at is gone, so the process that hosts it is stopped or dead: "
        f"rank 0, unless the launcher hosts it ({how})"
    )
    return Cause(0, "store", reason)
