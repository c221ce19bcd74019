"""Find ranks that would wait for one another: they call collectives of two groups in two orders.

Pure, as ``divergence``. Transfers are left out: ``kenotron_pp`` proves their order itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kenotron_dist.diagnosis.transfers import TRANSFERS
from kenotron_dist.in_flight import Entry

Call = tuple[str, int]
"""Channel and number of a collective."""


def circular_wait(records: Mapping[int, Sequence[Entry]]) -> str:
    """Describe in one line a circle of ranks of which each waits for the next; empty without one.

    Each collective is taken to end on all of its ranks before any of them calls its next one.
    Calls must match (``first_divergence``).

    Args:
        records: what ranks communicate, in their order.
    """
    orders = {
        rank: [entry for entry in entries if entry.ticket.operation not in TRANSFERS]
        for rank, entries in records.items()
    }
    before: dict[Call, list[tuple[int, Entry, Entry]]] = {}
    for rank, entries in orders.items():
        for entry in entries[:1]:
            before.setdefault(_call(entry), [])
        for earlier, later in zip(entries, entries[1:], strict=False):
            before.setdefault(_call(later), []).append((rank, earlier, later))
    waiting = _without_order(before)
    if not waiting:
        return ""
    # Each call that is left waits for another one that is left: going back ends in a circle.
    call, seen = next(iter(waiting)), dict[Call, tuple[int, Entry, Entry]]()
    while call not in seen:
        seen[call] = next(each for each in before[call] if _call(each[1]) in waiting)
        call = _call(seen[call][1])
    circle, first = [seen[call]], call
    while (call := _call(circle[-1][1])) != first:
        circle.append(seen[call])
    parts = [
        f"rank {rank} called {_text(earlier)} before {_text(later)}"
        for rank, earlier, later in reversed(circle)
    ]
    return f"ranks wait for one another: {'; '.join(parts)}"


def _without_order(before: Mapping[Call, Sequence[tuple[int, Entry, Entry]]]) -> dict[Call, int]:
    """Remove calls for which no rank has another one to make before; return those that are left."""
    open_calls = {call: len(edges) for call, edges in before.items()}
    after: dict[Call, list[Call]] = {}
    for call, edges in before.items():
        for _, earlier, _ in edges:
            after.setdefault(_call(earlier), []).append(call)
    ready = [call for call, count in open_calls.items() if not count]
    while ready:
        done = ready.pop()
        del open_calls[done]
        for call in after.get(done, ()):
            open_calls[call] -= 1
            if not open_calls[call]:
                ready.append(call)
    return open_calls


def _call(entry: Entry) -> Call:
    return entry.ticket.channel, entry.ticket.number


def _text(entry: Entry) -> str:
    return f"{entry.ticket.operation} over {entry.ticket.axis} at {entry.ticket.site}"
