"""Compare the calls of ranks that meet in a communication, and name the one that differs.

Pure: the ``CollectiveChecker`` collects what the ranks call, this file reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from kenotron_dist.in_flight import Entry
from kenotron_dist.ranks import listed

_TRANSFERS = ("send", "receive")
_MANY = 8


class Diverged(Exception):
    """Ranks do not call the same communications in the same order.

    The message is the same on all ranks, one line: channel, number, and for the ranks that differ
    what they called and where. No RuntimeError: no backend has failed.
    """


class Call(NamedTuple):
    """A call, with what other ranks compare."""

    operation: str
    how: str
    dtype: str
    shape: tuple[int, ...]
    site: str
    gives: tuple[int, ...] | None = None
    takes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, entry: Entry) -> Call:
        """What others need of an entry."""
        ticket, how, dtype, shape, _, gives, takes, _ = entry
        return cls(ticket.operation, how, dtype, shape, ticket.site, gives, takes)

    def encode(self) -> str:
        """As JSON text."""
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str | bytes) -> Call:
        """Undo ``encode``."""
        operation, how, dtype, shape, site, gives, takes = json.loads(text)
        counts = (None if each is None else tuple(each) for each in (gives, takes))
        return cls(operation, how, dtype, tuple(shape), site, *counts)

    @property
    def agreed(self) -> tuple[object, ...]:
        """What must be equal on all ranks; how much each gives another is compared by pairs."""
        if self.operation in _TRANSFERS:
            return "transfer", self.dtype
        if self.operation == "gather_pieces":  # a rank may have none
            return (self.operation,)
        shape = self.shape[1:] if self.operation == "all_to_all" else self.shape
        return self.operation, self.how, self.dtype, shape

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        of = f" of {self.dtype} {self.shape}" if self.dtype else ""
        return f"{self.operation}{how}{of} at {self.site}"


def divergence(channel: str, number: int, ranks: Sequence[int], calls: Mapping[int, Call]) -> str:
    """How the calls of the ranks that have come differ, in one line; empty if they do not.

    ``calls`` are those of some of ``ranks``, which are the channel's in its order.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault(call.agreed, []).append(rank)
    place = f"ranks diverge at communication {number} on {channel}"
    if len(kinds) > 1:
        few, *others = sorted(kinds.values(), key=lambda each: (len(each), each))
        culprit = few[0] if len(few) == 1 and all(len(each) > 1 for each in others) else None
        return f"{place}: {called(calls, culprit)}"
    for one, other in permutations(calls, 2):
        gives, takes = calls[one].gives, calls[other].takes
        if gives is None or takes is None:
            continue
        given, taken = gives[ranks.index(other)], takes[ranks.index(one)]
        if given != taken:
            pair = {one: calls[one], other: calls[other]}
            return (
                f"{place}: rank {one} gives {given} bytes to rank {other}, which expects {taken}: "
                f"{called(pair)}"
            )
    return ""


def called(calls: Mapping[int, Call], culprit: int | None = None) -> str:
    """Calls with their ranks, grouped by call; the diverging rank first."""
    by_call: dict[str, list[int]] = {}
    for rank in sorted(calls, key=lambda rank: (rank != culprit, rank)):
        by_call.setdefault(str(calls[rank]), []).append(rank)
    alone = " alone" if culprit is not None else ""
    parts = [
        f"{listed(ranks)}{alone if ranks == [culprit] else ''} called {what}"
        for what, ranks in by_call.items()
    ]
    return "; ".join(parts)


class Sites:
    """Where the ranks of a channel called the same from different lines.

    That is lawful (the first and the last stage have code of their own), and it is all that a
    skipped communication leaves behind when the next one is like it: ranks that stall report it.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[tuple[int, str], ...], int] = {}

    def note(self, number: int, calls: Mapping[int, Call]) -> None:
        """Remember a combination of lines that is new."""
        collective = {r: c.site for r, c in calls.items() if c.operation not in _TRANSFERS}
        if len(set(collective.values())) > 1 and len(self._seen) < _MANY:
            self._seen.setdefault(tuple(sorted(collective.items())), number)

    def __str__(self) -> str:
        found = []
        for combination, number in list(self._seen.items())[:3]:
            lines: dict[str, list[int]] = {}
            for rank, site in combination:
                lines.setdefault(site, []).append(rank)
            where = ", ".join(f"{listed(ranks)} at {site}" for site, ranks in lines.items())
            found.append(f"number {number} was called by {where}")
        return "; ".join(found)


class Standing(NamedTuple):
    """A waiting rank, as it publishes itself."""

    version: int
    """New with each wait."""
    channel: str
    number: int
    ranks: tuple[int, ...]
    call: str

    def encode(self) -> str:
        """As JSON text."""
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str | bytes) -> Standing:
        """Undo ``encode``."""
        version, channel, number, ranks, call = json.loads(text)
        return cls(version, channel, number, tuple(ranks), call)

    def __str__(self) -> str:
        return f"{self.call}, communication {self.number} on {self.channel}"


class Link(NamedTuple):
    """A rank of a circle, and those that have not come where it waits."""

    rank: int
    standing: Standing
    missing: tuple[int, ...]


def circle_text(circle: Sequence[Link]) -> str:
    """Ranks that wait for one another; where all but one have come, that one is the cause."""
    lone = {
        link.missing[0]
        for link in circle
        if len(link.missing) == 1 and len(link.standing.ranks) > 2
    }
    waits = "; ".join(
        f"rank {link.rank} waits in {link.standing} for {listed(link.missing)}" for link in circle
    )
    culprit = f"rank {min(lone)} alone has not come where it is awaited: " if len(lone) == 1 else ""
    return f"ranks diverge and wait for one another: {culprit}{waits}"


def ended_text(
    rank: int, standing: Standing, ended: Sequence[int], last: Mapping[int, Call]
) -> str:
    """A rank waits for some that have finished: those are the cause, or it, if they are most."""
    alone = " alone" if len(ended) > len(standing.ranks) / 2 else ""
    text = (
        f"ranks diverge: rank {rank}{alone} waits in {standing}, which {listed(ended)} will not "
        "call: finished"
    )
    before = {peer: last[peer] for peer in ended if peer in last}
    return f"{text}; the last before it: {called(before)}" if before else text
