"""Compare what the ranks of a mesh communicate, and name the first call in which they differ.

Pure: it reads what each rank has recorded (``record``), on real ranks or on those of a mesh without
processes (``Mesh.connect(backend="fake")``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from kenotron_dist.in_flight import Entry
from kenotron_dist.ranks import listed

_TRANSFERS = ("send", "receive")


class Diverged(Exception):
    """A rank does not call the communication that its peers call.

    The message is one line: channel, number, and for the ranks that differ what they call and
    where. No RuntimeError: no backend has failed.
    """


def first_divergence(records: Mapping[int, Sequence[Entry]]) -> str:
    """Describe in one line the first communication that its ranks call differently.

    Lines of code may differ: the first and the last stage of a pipeline have code of their own.
    Whether ranks call those of different groups in an order in which they wait for one another is
    not looked at.

    Args:
        records: what each rank of the world communicates, in its order.

    Returns:
        Channel, number, and for the ranks that differ what they call and where; empty where all
        communications fit.
    """
    meetings: dict[tuple[str, int], dict[int, Entry]] = {}
    begins: dict[tuple[str, int], int] = {}
    for rank, entries in records.items():
        for place, entry in enumerate(entries):
            meeting = entry.ticket.channel, entry.ticket.number
            meetings.setdefault(meeting, {})[rank] = entry
            begins[meeting] = min(begins.get(meeting, place), place)
    for meeting in sorted(begins, key=begins.__getitem__):
        calls = meetings[meeting]
        missing = [rank for rank in next(iter(calls.values())).ticket.ranks if rank not in calls]
        if found := divergence(*meeting, calls):
            return found
        if missing:
            return f"{_place(*meeting)}: {listed(missing)} did not call it; {_called(calls)}"
    return ""


def divergence(channel: str, number: int, calls: Mapping[int, Entry]) -> str:
    """Describe in one line how the calls of one communication differ; empty if they fit.

    Args:
        channel: who takes part (``Ticket.channel``).
        number: that of the communication on its channel.
        calls: the call of each rank that has made one, at least of one.
    """
    place = _place(channel, number)
    ranks = next(iter(calls.values())).ticket.ranks
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault(_agreed(call), []).append(rank)
    if len(kinds) > 1:
        few, *others = sorted(kinds.values(), key=lambda each: (len(each), each))
        culprit = few[0] if len(few) == 1 and all(len(each) > 1 for each in others) else None
        return f"{place}: {_called(calls, culprit)}"
    for one, other in permutations(calls, 2):
        gives, takes = calls[one].gives, calls[other].takes
        if gives is None or takes is None:
            continue
        given, taken = gives[ranks.index(other)], takes[ranks.index(one)]
        if given != taken:
            pair = {one: calls[one], other: calls[other]}
            return (
                f"{place}: rank {one} gives {given} bytes to rank {other}, which expects {taken}: "
                f"{_called(pair)}"
            )
    return ""


def _place(channel: str, number: int) -> str:
    return f"ranks diverge at communication {number} on {channel}"


def _agreed(call: Entry) -> tuple[object, ...]:
    """Return what must be equal on all ranks; what each gives another is compared by pairs."""
    operation = call.ticket.operation
    if operation in _TRANSFERS:
        return "transfer", call.dtype
    if operation == "gather_pieces":  # a rank may have none
        return (operation,)
    shape = call.shape[1:] if operation == "all_to_all" else call.shape
    return operation, call.how, call.dtype, shape


def _called(calls: Mapping[int, Entry], culprit: int | None = None) -> str:
    """Calls with their ranks, grouped by call; the diverging rank first."""
    by_call: dict[str, list[int]] = {}
    for rank in sorted(calls, key=lambda rank: (rank != culprit, rank)):
        by_call.setdefault(_text(calls[rank]), []).append(rank)
    alone = " alone" if culprit is not None else ""
    parts = [
        f"{listed(ranks)}{alone if ranks == [culprit] else ''} called {what}"
        for what, ranks in by_call.items()
    ]
    return "; ".join(parts)


def _text(call: Entry) -> str:
    how = f" ({call.how})" if call.how else ""
    of = f" of {call.dtype} {call.shape}" if call.dtype else ""
    return f"{call.ticket.operation}{how}{of} at {call.ticket.site}"
