"""No schedule hangs on NCCL: hosts, device queues and communicators of all ranks, simulated.

Processes issue work in the order of their plans. A queue runs its operations in order; a send and
its receive run when both are first in their queues. Where a communicator is made at its first use,
its two processes wait for each other; where a kernel is loaded at its first use, the process waits
until all its queues are empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import pytest

from kenotron_pp import (
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from kenotron_pp.comm_plan import Transfer, make_plan

ALL = [gpipe, one_f_one_b, interleaved(2), interleaved(3), zero_bubble_h1, zero_bubble_v]
SIZES = [*product((2, 3, 4), (1, 2, 3, 4, 5, 8)), (8, 1), (8, 3), (8, 16)]
Groups = Literal["pairs", "two lazy groups", "two bound groups"]
"""A group for each direction of each pair; or one group for each direction, whose communicators
are made pair by pair at their first use, or which has one communicator with one queue."""


@dataclass(eq=False)
class Work:
    """An operation on a queue; a transfer has an end on either rank."""

    name: Any
    after: list[Work] = field(default_factory=list)
    done: bool = False


class Rank:
    """The host program of one rank and its device's queues."""

    def __init__(self, rank: int, program: Iterator[Any]) -> None:
        self.rank, self.program = rank, program
        self.queues: dict[Any, deque[Work]] = {}
        self.waiting: Any = None
        """What blocks the host: a communicator's name, an operation, or "empty queues"."""
        self.ended = False

    def put(self, queue: Any, work: Work) -> Work:
        self.queues.setdefault(queue, deque()).append(work)
        return work


class Machine:
    """All ranks; ``run`` returns whether everything ended."""

    def __init__(
        self, schedule: Schedule, ranks: int, microbatches: int, groups: Groups,
        *, touched: bool, first: bool,
    ) -> None:  # fmt: skip
        self.schedule, self.n, self.groups = schedule, ranks, groups
        self.first = first
        self.met: dict[Any, set[int]] = {}
        if touched:
            for source, to in schedule.neighbours(ranks):
                self.met[self.communicator(source, to)] = {source, to}
        plans = [make_plan(schedule, rank, ranks, microbatches) for rank in range(ranks)]
        self.ranks = [Rank(rank, self.host(rank, plan)) for rank, plan in enumerate(plans)]

    def communicator(self, source: int, to: int) -> Any:
        if self.groups == "pairs":
            return source, to
        direction = "down" if source < to else "up"
        if self.groups == "two bound groups":
            return direction
        return direction, min(source, to), max(source, to)

    def host(self, rank: int, plan: Any) -> Iterator[Any]:
        """What ``Run.run`` calls, in its order; yields what the host waits for."""
        me = self.ranks[rank]
        forms: set[int] = set()
        place = dict.fromkeys(plan.queues, 0)
        posted: dict[Transfer, Work] = {}
        sent: dict[Transfer, Work] = {}
        loaded: set[tuple[str, int]] = set()
        last: list[Work] = []

        def transfer(one: Transfer, part: str) -> Iterator[Any]:
            name = self.communicator(one.source, one.to)
            if self.groups != "two bound groups" and self.met.get(name) != {one.source, one.to}:
                self.met.setdefault(name, set()).add(rank)
                yield name
            return me.put(name, Work((one, part), after=list(last)))

        def post(wanted: Transfer, ahead: bool) -> Iterator[Any]:
            queue = plan.queues[wanted.source]
            while wanted not in posted and place[wanted.source] < len(queue):
                coming = queue[place[wanted.source]]
                if self.first and coming.boundary not in forms:
                    if ahead:
                        return
                    forms.add(coming.boundary)
                    if coming.direction == "down":
                        for part in ("size", "text"):
                            yield (yield from transfer(coming, part))
                posted[coming] = yield from transfer(coming, "data")
                place[wanted.source] += 1

        for step in plan.steps:
            if step.need is not None:
                yield from post(step.need, ahead=False)
            ahead = step.underway if self.first else (step.following,)
            for one in ahead:
                if one is not None:
                    yield from post(one, ahead=True)
            after = [*last, *(sent[each] for each in step.release)]
            if step.need is not None:
                after.append(posted[step.need])
            kernel = (step.action.kind, step.action.chunk)
            if self.first and kernel not in loaded:
                loaded.add(kernel)
                yield "empty queues"
            last = [me.put("compute", Work(step.action, after=after))]
            one = step.result
            if one is not None:
                if self.first and one.direction == "down" and one.boundary not in forms:
                    forms.add(one.boundary)
                    for part in ("size", "text"):
                        yield from transfer(one, part)
                sent[one] = yield from transfer(one, "data")

    def run(self) -> bool:
        moved = True
        while moved:
            moved = any(self.advance(rank) for rank in self.ranks)
            moved |= any(self.compute(rank) for rank in self.ranks)
            moved |= any(self.move(a, b) for a in self.ranks for b in self.ranks)
        return all(rank.ended and not any(rank.queues.values()) for rank in self.ranks)

    def advance(self, rank: Rank) -> bool:
        moved = False
        while not rank.ended and not self.blocked(rank):
            rank.waiting = next(rank.program, self)
            rank.ended, moved = rank.waiting is self, True
        return moved

    def blocked(self, rank: Rank) -> bool:
        if rank.waiting is None:
            return False
        if rank.waiting == "empty queues":
            return any(rank.queues.values())
        if isinstance(rank.waiting, Work):
            return not rank.waiting.done
        return len(self.met[rank.waiting]) < 2

    def compute(self, rank: Rank) -> bool:
        queue, moved = rank.queues.get("compute", deque()), False
        while queue and all(work.done for work in queue[0].after):
            queue.popleft().done = moved = True
        return moved

    def move(self, a: Rank, b: Rank) -> bool:
        moved = False
        for name, queue in a.queues.items():
            other = b.queues.get(name)
            if name == "compute" or a is b or not queue or not other:
                continue
            one, two = queue[0], other[0]
            (transfer, _), (met, _) = one.name, two.name
            if {transfer.source, transfer.to} != {a.rank, b.rank} != {met.source, met.to}:
                continue
            if all(work.done for work in (*one.after, *two.after)) and one.name == two.name:
                queue.popleft().done = other.popleft().done = moved = True
        return moved


def ends(schedule: Schedule, ranks: int, microbatches: int, groups: Groups, **how: bool) -> bool:
    return Machine(schedule, ranks, microbatches, groups, **how).run()


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_the_first_and_later_runs_end_on_every_size(schedule: Schedule) -> None:
    for ranks, microbatches in SIZES:
        first = ends(schedule, ranks, microbatches, "pairs", touched=True, first=True)
        later = ends(schedule, ranks, microbatches, "pairs", touched=True, first=False)
        assert first and later, (ranks, microbatches)


def test_a_first_touch_in_the_order_of_a_schedule_would_hang() -> None:
    for ranks in (3, 4, 8):
        how = {"touched": False, "first": False}
        assert not ends(interleaved(2), ranks, 1, "two lazy groups", **how)


def test_one_queue_for_a_direction_would_hang() -> None:
    how = {"touched": True, "first": False}
    assert not ends(interleaved(2), 4, 2, "two bound groups", **how)
