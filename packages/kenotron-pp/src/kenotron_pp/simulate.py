"""Run a schedule without processes: proof of order and of absence of deadlock, and its cost."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import NamedTuple

from kenotron_pp.schedule import Action, Order, Schedule, as_schedule, rank_actions

Cost = float | Sequence[float]
"""A time of every stage, or one for each."""


@dataclass(frozen=True)
class Times:
    """Durations of actions, in any unit: finite, and not negative.

    Raises ValueError for anything else, as ``simulate`` does when a list of times has not one for
    each stage.
    """

    F: Cost = 1
    B: Cost = 2
    I: Cost = 1  # noqa: E741 - the letter of the literature
    W: Cost = 1
    transfer: float = 0
    """Between an action and the one on another rank that needs its result."""
    unsplit: frozenset[int] = frozenset()
    """Stages whose layers compute weight gradients in I."""

    def __post_init__(self) -> None:
        for name in "FBIW":
            cost = getattr(self, name)
            each = isinstance(cost, Sequence) and not isinstance(cost, str)
            for stage, value in enumerate(cost if each else [cost]):
                _check_time(f"{name} of stage {stage}" if each else name, value)
        _check_time("transfer", self.transfer, lists="")
        if not isinstance(self.unsplit, Collection):
            raise ValueError(f"Times: unsplit is {self.unsplit!r}: give a set of stage numbers")

    def check_stages(self, n_stages: int) -> None:
        """Raise ValueError when a list, or a stage of ``unsplit``, does not fit ``n_stages``."""
        for name in "FBIW":
            cost = getattr(self, name)
            if isinstance(cost, Sequence) and len(cost) != n_stages:
                raise ValueError(
                    f"Times: {name} has {len(cost)} times, and there are {n_stages} stages (ranks "
                    "x chunks): give one for each, or one number for all"
                )
        unknown = [stage for stage in self.unsplit if stage not in range(n_stages)]
        if unknown:
            raise ValueError(
                f"Times: unsplit has stage {unknown[0]!r}, and there are {n_stages} (ranks x "
                f"chunks): give stages of 0 to {n_stages - 1}"
            )

    def of(self, kind: str, stage: int) -> float:
        """Time of one action."""
        if stage in self.unsplit and kind in "IW":
            return self.of_split("I", stage) + self.of_split("W", stage) if kind == "I" else 0
        return self.of_split(kind, stage)

    def of_split(self, kind: str, stage: int) -> float:
        """The same, were every stage split."""
        cost = getattr(self, kind)
        return cost[stage] if isinstance(cost, Sequence) else cost


def _check_time(name: str, value: float, lists: str = ", or a list of one for each stage") -> None:
    if not isinstance(value, Real) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"Times: {name} is {value!r}: give a finite number from 0 up{lists}")


class Event(NamedTuple):
    """One action of the timeline."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """Cost of a schedule."""

    ticks: float
    """From the first start to the last end, in the unit of the times."""
    bubble: float
    """Share of all ranks' time in which a rank waits."""
    peak_live: tuple[int, ...]
    """Most activations alive at once on each rank: F done, B or I not, one a chunk."""
    peak_deferred: tuple[int, ...]
    """Most inputs and output gradients kept for W at once on each rank: I done, W not."""
    peak_kept: tuple[int, ...]
    """Most of both together."""
    timeline: tuple[Event, ...]
    """Every action, rank by rank in order."""
    ranks: int
    chunks: int

    def __str__(self) -> str:
        kept = f", put off {list(self.peak_deferred)}" if any(self.peak_deferred) else ""
        live = f"most activations alive {list(self.peak_live)}"
        return f"{self.ticks:g} ticks, bubble {self.bubble:.1%}, {live}{kept}"


LIVE = {"F": 1, "B": -1, "I": -1, "W": 0}
"""Activations that an action adds to those alive, by its kind."""
Span = tuple[list[float], list[float]]
"""Starts and ends of a rank's actions"""
Done = tuple[str, int]
"""(kind, stage) of an action"""
Ends = list[float | None]
"""When each micro-batch of a stage is done; None: not yet"""
Work = tuple[Done, float, Ends, list[tuple[Done, Ends, bool]]]
"""A kind of work: its name, time, ends, and what it needs: name, ends, done by another rank"""


def simulate(
    schedule: Schedule | Order, n_ranks: int, n_microbatches: int, times: Times | None = None
) -> Trace:
    """Execute a schedule on imaginary ranks, each action as soon as what it needs is there.

    A forward needs the stage before to have done it, a backward (or I) the stage after and its own
    forward, a W its own I. Raises ValueError naming the stuck actions when the lists deadlock, when
    a micro-batch is missing or repeated, or when an action of a chunk is out of ascending order;
    for a count below 1, for times that do not fit the stages, and when they add up to infinity.
    """
    schedule, times = as_schedule(schedule), times or Times()
    lists = rank_actions(schedule, n_ranks, n_microbatches)
    spans, ticks, bubble = _run(schedule, lists, n_microbatches, times)
    peaks = [_peaks(own, schedule, rank, n_ranks, times) for rank, own in enumerate(lists)]
    live, deferred, kept = zip(*peaks, strict=True)
    timeline = tuple(
        Event(rank, *each)
        for rank, (own, span) in enumerate(zip(lists, spans, strict=True))
        for each in zip(own, *span, strict=True)
    )
    return Trace(ticks, bubble, live, deferred, kept, timeline, n_ranks, schedule.chunks)


def pipeline_time(
    schedule: Schedule | Order, lists: Sequence[Sequence[Action]], times: Times
) -> tuple[float, float]:
    """Return ``ticks`` and ``bubble`` of ``simulate`` without its timeline, in half the time.

    Args:
        schedule: the schedule.
        lists: its ``rank_actions``.
        times: of its actions.

    Raises:
        ValueError: as ``simulate`` does for times, and for lists that deadlock.
    """
    n_microbatches = 1 + max(action.microbatch for action in lists[0])
    return _run(as_schedule(schedule), lists, n_microbatches, times)[1:]


def _run(
    schedule: Schedule, lists: Sequence[Sequence[Action]], n_microbatches: int, times: Times
) -> tuple[list[Span], float, float]:
    """Return the spans of every rank's actions, ticks and bubble."""
    n_ranks = len(lists)
    times.check_stages(n_ranks * schedule.chunks)
    spans = play(schedule, lists, n_microbatches, times)
    ticks = max(ends[-1] for _, ends in spans)
    if not ticks * n_ranks <= sys.float_info.max:
        raise ValueError(
            f"the times of {n_ranks} ranks add up to {ticks * n_ranks}: give Times in a larger unit"
        )
    busy = sum(end - start for span in spans for start, end in zip(*span, strict=True))
    bubble = max(0.0, 1 - busy / (ticks * n_ranks)) if ticks else 0.0
    return spans, ticks, bubble


def peak_live(lists: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return ``Trace.peak_live`` of ``rank_actions``."""
    return tuple(max(accumulate(LIVE[action.kind] for action in own)) for own in lists)


def play(
    schedule: Schedule, lists: Sequence[Sequence[Action]], n_microbatches: int, times: Times
) -> list[Span]:
    """The starts and ends of every rank's actions. Raises ValueError when they deadlock."""
    n_ranks = len(lists)
    owner = {
        schedule.stage(rank, chunk, n_ranks): rank
        for rank in range(n_ranks)
        for chunk in range(schedule.chunks)
    }
    ends: dict[Done, Ends] = {
        (kind, stage): [None] * n_microbatches for kind in "FBIW" for stage in owner
    }

    def described(kind: str, stage: int) -> Work:
        sources = [(need, ends[need], far) for need, far in _sources(kind, stage, owner)]
        return (kind, stage), times.of(kind, stage), ends[kind, stage], sources

    programs = [
        {
            (kind, chunk): described(kind, schedule.stage(rank, chunk, n_ranks))
            for kind in "FBIW"
            for chunk in range(schedule.chunks)
        }
        for rank in range(n_ranks)
    ]
    waiting: dict[tuple[Done, int], int] = {}  # what a rank is stuck at
    spans: list[Span] = [([], []) for _ in lists]
    ready = list(range(n_ranks))
    while ready:
        rank = ready.pop()
        (begun, over), own, actions = spans[rank], programs[rank], lists[rank]
        start = over[-1] if over else 0.0
        for at in range(len(over), len(actions)):
            kind, m, chunk = actions[at]
            key, cost, done, sources = own[kind, chunk]
            for need, found, far in sources:
                end = found[m]
                if end is None:
                    waiting[need, m] = rank
                    break
                if far and (end := end + times.transfer) > start:
                    start = end
            else:
                begun.append(start)
                done[m] = start = start + cost
                over.append(start)
                woken = waiting.pop((key, m), None) if waiting else None
                if woken is not None and woken != rank:
                    ready.append(woken)
                continue
            break
    stuck = [
        f"rank {rank} at {actions[len(over)]}"
        for rank, (actions, (_, over)) in enumerate(zip(lists, spans, strict=True))
        if len(over) < len(actions)
    ]
    if stuck:
        raise ValueError(f"schedule {schedule.name} deadlocks: {', '.join(stuck)}")
    return spans


def _sources(kind: str, stage: int, owner: Mapping[int, int]) -> tuple[tuple[Done, bool], ...]:
    """Return what must be done before, and True where another rank does it. A rank's own work is
    done before its clock. B and I have the same needs: a schedule has one of them."""
    if kind == "W":
        return ((("I", stage), False),)
    found = [] if kind == "F" else [(("F", stage), False)]
    other = stage - 1 if kind == "F" else stage + 1
    if other in owner:
        found.append(((kind, other), owner[other] != owner[stage]))
    return tuple(found)


def _peaks(
    actions: Sequence[Action], schedule: Schedule, rank: int, n_ranks: int, times: Times
) -> tuple[int, int, int]:
    late = [
        schedule.stage(rank, chunk, n_ranks) not in times.unsplit
        for chunk in range(schedule.chunks)
    ]
    live = deferred = most_live = most_deferred = most_kept = 0
    for kind, _, chunk in actions:
        live += LIVE[kind]
        if kind in "IW" and late[chunk]:
            deferred += 1 if kind == "I" else -1
            most_deferred = max(most_deferred, deferred)
        most_live, most_kept = max(most_live, live), max(most_kept, live + deferred)
    return most_live, most_deferred, most_kept
