"""The log of collectives that ranks share in the store, for a ``CollectiveChecker``.

``<channel>/<number>/<rank>``: what a rank calls, before it does. ``stands/<rank>``: what it waits
in. ``diverged``: the divergence that was found first. All of it may be used from any thread.
"""

from __future__ import annotations

import threading

import torch.distributed as dist

from kenotron_dist.diagnosis.divergence import Call, Link, Standing
from kenotron_dist.in_flight import Entry
from kenotron_dist.launch import signing_key
from kenotron_dist.shutdown import ENDED
from kenotron_dist.signed_store import SignedStore, own_connection


class CollectiveLog:
    """This rank's entries in the shared log, and read access to those of its peers.

    Made in the same order on all ranks.

    Arguments: this rank; the store that all ranks share, of which a clone is used. Methods raise
    RuntimeError when the store is gone.
    """

    def __init__(self, rank: int, store: dist.Store) -> None:
        times = store.add(f"kenotron-posts/{rank}", 1)
        own, self.rank = own_connection(store), rank
        self._store = SignedStore(own, f"kenotron-posts/{times}", signing_key())
        self._ends = SignedStore(own, ENDED, signing_key())
        self._lock = threading.RLock()  # a store's connection serves one caller at a time
        self._open: dict[str, list[int]] = {}
        self._kept: dict[str, int] = {}
        self._version = 0
        self._standing: list[Standing] = []

    def divergence(self) -> str:
        """The divergence that some rank has found; empty while there is none."""
        with self._lock:
            return (self._store.find("diverged") or b"").decode()

    def report(self, text: str) -> str:
        """Report a divergence to all ranks. Returns the first that was reported."""
        with self._lock:
            return self._store.compare_set("diverged", "", text).decode()

    def fail(self, cause: str) -> None:
        """Inform all ranks that communications over this mesh end, and why."""
        with self._lock:
            self._store.compare_set("failed", "", cause)

    def failed(self) -> str:
        """Why they end; empty while they do not."""
        with self._lock:
            return (self._store.find("failed") or b"").decode()

    def end(self) -> None:
        """Inform all ranks that this one communicates no more."""
        with self._lock:
            self._store.set(f"ended/{self.rank}", "")

    def post(self, entry: Entry) -> None:
        """Publish a call."""
        ticket = entry.ticket
        with self._lock:
            numbers = self._open.setdefault(ticket.channel, [])
            numbers.append(ticket.number)
            text = f"{min(numbers)} {Call.of(entry).encode()}"
            self._store.set(_key(ticket.channel, ticket.number, self.rank), text)

    def read(self, entry: Entry, rank: int) -> tuple[int, Call] | None:
        """A rank's call of this number, and the first one that it has not done with."""
        channel, number = entry.ticket.channel, entry.ticket.number
        with self._lock:
            found = self._store.find(_key(channel, number, rank))
        if found is None:
            return None
        low, _, call = found.decode().partition(" ")
        return int(low), Call.decode(call)

    def erase(self, channel: str, low: int) -> None:
        """Forget what all have done with: ``low`` is the first number that others have not."""
        with self._lock:
            low, kept = min([low, *self._open[channel]]), self._kept.get(channel, 1)
            for number in range(kept, low):
                self._store.delete_key(_key(channel, number, self.rank))
            self._kept[channel] = max(low, kept)

    def done(self, entry: Entry) -> None:
        """This rank has waited for it."""
        with self._lock:
            self._open[entry.ticket.channel].remove(entry.ticket.number)

    def stand(self, entry: Entry) -> Standing:
        """Publish that this rank waits; nothing is published while two of its threads do."""
        ticket, call = entry.ticket, str(Call.of(entry))
        with self._lock:
            self._version += 1
            here = Standing(self._version, ticket.channel, ticket.number, ticket.ranks, call)
            self._standing.append(here)
            self._say()
        return here

    def leave(self, here: Standing) -> None:
        """It waits no longer."""
        with self._lock:
            self._standing.remove(here)
            self._say()

    def missing(self, standing: Standing) -> tuple[int, ...]:
        """Who has not come where a rank waits."""
        channel, number, ranks = standing.channel, standing.number, standing.ranks
        return tuple(rank for rank in ranks if not self._has_come(channel, number, rank))

    def ended(self, standing: Standing) -> list[int]:
        """Those who have finished and not come where a rank waits."""
        ended = {rank for rank in standing.ranks if self._has_ended(rank)}
        return sorted(ended & {*self.missing(standing)})  # it may have come and then ended

    def circle(self) -> tuple[Link, ...]:
        """Ranks that wait for one another, and this one for them; empty if there are none."""
        with self._lock:
            here = self._standing[0] if len(self._standing) == 1 else None
        return () if here is None else self._follow(self.rank, here, (), {self.rank})

    def _follow(
        self, rank: int, standing: Standing, path: tuple[Link, ...], seen: set[int]
    ) -> tuple[Link, ...]:
        missing = self.missing(standing)
        path = (*path, Link(rank, standing, missing))
        for peer in missing:
            places = [i for i, link in enumerate(path) if link.rank == peer]
            if places:
                return path[places[0] :]
            there = self._stands(peer) if peer not in seen else None
            seen.add(peer)
            found = self._follow(peer, there, path, seen) if there is not None else ()
            if found:
                return found
        return ()

    def _stands(self, rank: int) -> Standing | None:
        with self._lock:
            text = self._store.find(f"stands/{rank}")
        return None if text is None or text == b"-" else Standing.decode(text)

    def _has_ended(self, rank: int) -> bool:
        with self._lock:
            return self._store.has(f"ended/{rank}") or self._ends.has(str(rank))

    def _say(self) -> None:
        one = len(self._standing) == 1
        self._store.set(f"stands/{self.rank}", self._standing[0].encode() if one else "-")

    def _has_come(self, channel: str, number: int, rank: int) -> bool:
        with self._lock:
            return self._store.has(_key(channel, number, rank))


def _key(channel: str, number: int, rank: int) -> str:
    return f"{channel}/{number}/{rank}"
