"""Compare the calls of ranks before they communicate: ``KENOTRON_DEBUG=collectives``.

A rank posts each call in the store before it starts it, and then looks at what others have posted
under the same number: of two that differ at least one sees the other, and starts nothing. No rank
waits there, so no order of calls that works without the comparison hangs with it. What a rank never
calls is not found here, but by those that wait for it (``watch``).
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import torch.distributed as dist

from kenotron_dist.diagnosis.divergence import Diverged, divergence
from kenotron_dist.diagnosis.listening import Listening
from kenotron_dist.in_flight import CallsInFlight, Entry, Ticket
from kenotron_dist.launch import signing_key
from kenotron_dist.signed_store import SignedStore, own_connection

_ROUND, _PAUSE = 2.0, 0.02
"""Seconds to let others come once two differ: with more calls the cause is more certain."""
_KEPT = 1000
"""Calls of a channel that stay in the store."""


class CollectiveChecker(Listening):
    """Compares a rank's calls with its peers', until it is closed. Made on all ranks.

    Args:
        pulse: what calls it.
        rank: this rank.
        store: that of all ranks; a connection of its own is used.
    """

    def __init__(self, pulse: CallsInFlight, rank: int, store: dist.Store) -> None:
        times = store.add(f"kenotron-calls/{rank}", 1)
        self._store = SignedStore(own_connection(store), f"kenotron-calls/{times}", signing_key())
        self._rank, self._lock = rank, threading.Lock()
        super().__init__(pulse)

    def heard(self, entry: Entry) -> None:
        """Post a call and compare it. Raises Diverged."""
        channel, number = entry.ticket.channel, entry.ticket.number
        with self._lock:  # a store's connection serves one caller at a time
            self._store.set(f"{channel}/{number}/{self._rank}", json.dumps(entry))
            if number > _KEPT:
                self._store.delete_key(f"{channel}/{number - _KEPT}/{self._rank}")
            calls = {self._rank: entry}
            end = None
            while text := divergence(channel, number, self._others(entry, calls)):
                end = time.monotonic() + _ROUND if end is None else end
                if len(calls) == len(entry.ticket.ranks) or time.monotonic() > end:
                    raise Diverged(text)
                time.sleep(_PAUSE)

    def _others(self, entry: Entry, calls: dict[int, Entry]) -> dict[int, Entry]:
        """Add to ``calls`` those that were posted since."""
        for rank in entry.ticket.ranks:
            key = f"{entry.ticket.channel}/{entry.ticket.number}/{rank}"
            if rank not in calls and (found := self._store.find(key)) is not None:
                calls[rank] = _decoded(found)
        return calls


def _decoded(text: bytes) -> Entry:
    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    ticket, *rest = tuples(json.loads(text))
    return Entry(Ticket(*ticket), *rest)
