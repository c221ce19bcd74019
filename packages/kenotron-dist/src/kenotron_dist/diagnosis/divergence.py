"""Compare what the ranks of a mesh communicate, and name the first call in which they differ.

Pure: it reads what each rank has recorded (``record``), on real ranks or on those of a mesh without
processes (``Mesh.connect(backend="fake")``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from kenotron_dist.diagnosis.circular_wait import circular_wait
from kenotron_dist.diagnosis.transfers import TRANSFERS, unmatched_transfer
from kenotron_dist.in_flight import Entry
from kenotron_dist.ranks import listed

ANY_SIZE = ("gather_pieces", "gather_objects")
"""Operations whose sizes may differ: a rank may have no pieces; ranks of a fake world do not know
how long the longest object is."""


class Diverged(Exception):
    """A rank does not call the communication that its peers call.

    The message is one line: channel, number, and for the ranks that differ what they call and
    where. No RuntimeError: no backend has failed.
    """


def first_divergence(records: Mapping[int, Sequence[Entry]]) -> str:
    """Describe in one line the first communication that its ranks call differently.

    Lines of code may differ: the first and the last stage of a pipeline have code of their own.
    Collectives are matched first, then transfers (``unmatched_transfer``), then the order of
    collectives of different groups (``circular_wait``).

    Args:
        records: what ranks of the world communicate, in their order. Ranks that are not among them
            are not looked at.

    Returns:
        Channel, number, and for the ranks that differ what they call and where; empty where all
        communications fit.
    """
    return _first_collective(records) or unmatched_transfer(records) or circular_wait(records)


def _first_collective(records: Mapping[int, Sequence[Entry]]) -> str:
    """Describe in one line the first collective that its ranks call differently."""
    meetings: dict[tuple[str, int], dict[int, Entry]] = {}
    begins: dict[tuple[str, int], int] = {}
    for rank, entries in records.items():
        for place, entry in enumerate(entries):
            if entry.ticket.operation in TRANSFERS:
                continue
            meeting = entry.ticket.channel, entry.ticket.number
            meetings.setdefault(meeting, {})[rank] = entry
            begins[meeting] = min(begins.get(meeting, place), place)
    for meeting in sorted(begins, key=begins.__getitem__):
        calls = meetings[meeting]
        ranks = next(iter(calls.values())).ticket.ranks
        silent = [rank for rank in ranks if rank in records and rank not in calls]
        found = divergence(*meeting, calls)
        if silent and not found:
            found = f"{_place(*meeting)}: {listed(silent)} did not call it; {_called(calls)}"
        if found:
            few, *others = _kinds(calls)
            odd = silent[0] if silent else few[0]
            peers = [rank for rank in calls if rank not in few or not others]
            departure = _departure(records, odd, peers)
            return found if departure in found else f"{found}; before that, {departure}"
    return ""


def _departure(records: Mapping[int, Sequence[Entry]], odd: int, peers: Sequence[int]) -> str:
    """Describe the first call at which a rank departs from the peer with which it shares most.

    A rank that skips one of several equal calls is noticed at the last of them, or never calls it.
    """

    def shared(peer: int) -> int:
        pairs = list(zip(records[odd], records[peer], strict=False))
        return next((i for i, pair in enumerate(pairs) if _differ(*pair)), len(pairs))

    peer = max((each for each in peers if each != odd), key=shared, default=odd)
    if peer == odd or not (place := shared(peer)):
        return ""
    own, its = (records[rank][place : place + 1] for rank in (odd, peer))
    said = f"called {_text(own[0])}" if own else "made no more calls"
    more = f", where rank {peer} called {_text(its[0])}" if its else f", unlike rank {peer}"
    return f"rank {odd} {said}{more}"


def _differ(one: Entry, other: Entry) -> bool:
    (_, axis, _, _, *call), (_, other_axis, _, _, *other_call) = one.ticket, other.ticket
    return (axis, call, _agreed(one)) != (other_axis, other_call, _agreed(other))


def divergence(channel: str, number: int, calls: Mapping[int, Entry]) -> str:
    """Describe in one line how the calls of one communication differ; empty if they fit.

    Args:
        channel: who takes part (``Ticket.channel``).
        number: that of the communication on its channel.
        calls: the call of each rank that has made one, at least of one.
    """
    place = _place(channel, number)
    ranks = next(iter(calls.values())).ticket.ranks
    few, *others = _kinds(calls)
    if others:
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


def _kinds(calls: Mapping[int, Entry]) -> list[list[int]]:
    """Group ranks by what must be equal; the smallest group first."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault(_agreed(call), []).append(rank)
    return sorted(kinds.values(), key=lambda each: (len(each), each))


def _place(channel: str, number: int) -> str:
    return f"ranks diverge at communication {number} on {channel}"


def _agreed(call: Entry) -> tuple[object, ...]:
    """Return what must be equal on all ranks; what each gives another is compared by pairs."""
    operation = call.ticket.operation
    if operation in TRANSFERS:
        return "transfer", call.dtype
    if operation in ANY_SIZE:
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
