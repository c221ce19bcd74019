"""Heartbeats of the ranks and the first cause of a failure, in the store that they share.

One daemon thread does all the writing and reading through a clone of the store. A store whose host
is stopped blocks its callers for ever whatever their timeout, so no other thread may wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from kenotron_dist.device import bind_thread
from kenotron_dist.diagnosis.hang_diagnosis import Beat, Cause, Seen
from kenotron_dist.signed_store import SignedStore


class Heartbeat:
    """Writes this rank's beat every ``interval`` seconds; reads those of the ranks asked for.

    Args:
        store: the same on all ranks; this is its only user.
        rank: this rank.
        interval: seconds from one beat to the next.
        beat: makes a beat of its number; called in the heartbeat's thread.
        device: whose queue a beat looks at.
    """

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        interval: float,
        beat: Callable[[int], Beat],
        device: torch.device,
    ) -> None:
        self._store, self._rank, self._interval, self._beat = store, rank, interval, beat
        self.seen: dict[int, Seen] = {}
        """Last known state of other ranks. Read it; only the heartbeat writes."""
        self.cause: Cause | None = None
        """The first cause that some rank found, as far as this one has read."""
        self.broken = ""
        """The store's error once it has failed."""
        self.answered = time.monotonic()
        """Time of the store's last answer."""
        self._asked: frozenset[int] = frozenset()
        self._changes: deque[tuple[str, str]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        self._device = device
        self._thread = threading.Thread(target=self._run, name="kenotron-heartbeat", daemon=True)
        self._thread.start()

    def ask(self, ranks: Iterable[int]) -> None:
        """From now on read the beats of these ranks, and of no others."""
        wanted = frozenset(ranks) - {self._rank}
        if wanted == self._asked:
            return
        now = time.monotonic()
        with self._lock:
            self.seen = {rank: self.seen.get(rank, Seen(None, now, 0)) for rank in wanted}
        self._asked = wanted
        self._wake.set()

    def claim(self, cause: Cause) -> None:
        """Write a cause unless another stands there; what stands is soon in ``cause``."""
        self._changes.append(("", cause.encode()))
        self._wake.set()

    def withdraw(self, cause: Cause) -> None:
        """Erase a cause that is over, if it is the one that stands there."""
        self._changes.append((cause.encode(), ""))
        self._wake.set()

    def close(self, patience: float) -> None:
        """Write the last beat and end the thread, unless the store takes longer than patience."""
        self._stop = True
        self._wake.set()
        self._thread.join(patience)

    def _run(self) -> None:
        number = 0
        bind_thread(self._device)
        try:
            while True:
                number += 1
                last = self._stop
                self._round(number)
                self.answered = time.monotonic()
                if last:
                    return
                self._wake.wait(self._interval)
                self._wake.clear()
        except RuntimeError as error:  # every store's failure, its timeouts included
            self.broken = str(error).partition("\n")[0]

    def _round(self, number: int) -> None:
        self._store.set(f"beat/{self._rank}", self._beat(number).encode())
        while self._changes:
            self._store.compare_set("cause", *self._changes.popleft())
        standing = self._store.find("cause")
        self.cause = Cause.decode(standing) if standing else None
        for rank in sorted(self._asked):
            if (beat := self._store.find(f"beat/{rank}")) is not None:
                self._note(rank, Beat.decode(beat))

    def _note(self, rank: int, beat: Beat) -> None:
        with self._lock:
            before = self.seen.get(rank)
            if before is None:
                return
            if before.beat is None:  # it may have stood there for long: it proves nothing yet
                self.seen[rank] = Seen(beat, before.changed, 0)
            elif before.beat.number != beat.number:
                self.seen[rank] = Seen(beat, time.monotonic(), before.moves + 1)
