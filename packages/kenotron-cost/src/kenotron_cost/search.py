"""The best layouts of a model on a machine: all legal ones, by their time, memory or price."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.layouts import RECOMPUTES, PlannedLayout
from kenotron_cost.machine_file import Machine
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.memory import PeakMemory, least_memory, peak_memory
from kenotron_cost.step_time import StepTime, TimedModel
from kenotron_models import Recompute, TransformersSpec

Objective = Literal["time", "memory", "price"]
BEST = 10
"""Layouts that a search returns."""


@dataclass(frozen=True)
class Estimate:
    """A layout, its time and its memory."""

    layout: PlannedLayout
    plan: CostPlan
    again: tuple[Recompute, ...]
    """What each block computes again."""
    time: StepTime
    memory: PeakMemory
    room: float
    """Bytes of a device's memory."""
    sent: dict[str, int]
    """Bytes that the rank that sends most sends in a step, by axis."""
    proof: str
    """The words for where the numbers of its time are from."""

    @property
    def fits(self) -> bool:
        """True where all that is counted fits into a device."""
        return self.memory.total <= self.room


@dataclass
class Found:
    """Result of a search."""

    best: list[Estimate]
    """The best ones that fit; where none does, those that lack least memory."""
    tried: int
    """Legal layouts, with every recomputation and ZeRO stage."""


class Planner:
    """Estimates of layouts of one model on one machine.

    Args:
        plan: any plan of the model.
        machine: the machine.
        room: bytes of a device's memory.
        imbalance: of experts; see ``MeasuredModel``.
    """

    def __init__(
        self, plan: CostPlan, machine: Machine, room: float, imbalance: float = 1.0
    ) -> None:
        self.measured = MeasuredModel(plan, imbalance=imbalance)
        self.timed = TimedModel(self.measured, machine)
        self.room = room
        self.machine = machine
        self.blocks = len(self.measured.kinds)
        foreign = isinstance(plan.spec, TransformersSpec)
        self.recomputes: tuple[Recompute, ...] = ("none", "full") if foreign else RECOMPUTES

    def estimate(
        self,
        layout: PlannedLayout,
        plan: CostPlan,
        again: Sequence[Recompute],
        memory: PeakMemory | None = None,
        *,
        exact: bool = True,
    ) -> Estimate:
        """Return time and memory of a layout.

        Args:
            layout: its name.
            plan: its plan.
            again: what each block computes again.
            memory: its peak, where it is known.
            exact: simulate every micro-batch of the pipeline.
        """
        memory = memory or self.memory(plan, again)
        time = self.timed.step(plan, again, exact=exact)
        sent = [
            self.measured.sent_by_stage(plan, rank, again)
            for rank in self.measured.differing(plan, again)
        ]
        most = max(sent, key=lambda each: sum(each.values()))
        proof = self.timed.proof(plan)
        return Estimate(layout, plan, tuple(again), time, memory, self.room, most, proof)

    def memory(self, plan: CostPlan, again: Sequence[Recompute]) -> PeakMemory:
        """Return the largest instant of the fullest rank."""
        return peak_memory(plan, self.measured, again, self.machine)

    def search(
        self, legal: Iterable[tuple[PlannedLayout, CostPlan]], objective: Objective = "time"
    ) -> Found:
        """Return the best of some layouts, with every recomputation and ZeRO stage.

        Of those with equal axes and order of the pipeline the best one is kept. Layouts are looked
        at in the order of seconds, or bytes, that they need at least, until none can be better than
        those that were found. A price of equally many devices is in the order of seconds.

        Raises:
            ValueError: there is no such objective.
        """
        check_objective(objective)
        in_bytes = objective == "memory"
        groups, tried = self._by_memory(legal) if in_bytes else self._groups(legal)
        best, near = dict[tuple, Estimate](), list[tuple[float, int, tuple]]()
        # Groups come in the order of their bounds. One above the limit is passed over; if its grid
        # has no layout among the best, the limit is that of the last of them, and no later one can
        # help.
        for number, (bound, layout, plan, again) in enumerate(groups):
            limit = _limit(best, layout, objective)[0]
            if _cost(bound, layout, objective) > limit:
                if layout.grid not in best:
                    break
                continue
            stages = [(layout, plan)] if in_bytes else _stages_of_zero(layout, plan, again[0])
            for named, candidate in stages:
                limits = _limit(best, layout, objective)
                if not in_bytes:
                    seconds = bound + self.timed.after(candidate, again)
                    if _cost(seconds, layout, objective) > limits[0]:
                        continue
                # Memory is the costly number, so it comes last. What does not fit is kept for the
                # case that nothing does.
                memory = self.memory(candidate, again)
                if memory.total > self.room:
                    near = sorted([*near, (memory.total, number, (named, candidate, again))])[:BEST]
                elif not in_bytes or memory.total <= limits[0]:
                    new = self.estimate(named, candidate, again, memory, exact=False)
                    if _key(new, objective) < limits:
                        best[layout.grid] = new
                        ordered = sorted(best.items(), key=lambda each: _key(each[1], objective))
                        best = dict(ordered[:BEST])
        # Only the best are simulated with every micro-batch.
        chosen = [(each.layout, each.plan, each.again) for each in best.values()]
        exact = [self.estimate(*each) for each in chosen or [each for *_, each in near]]
        order: Objective = objective if chosen else "memory"
        return Found(sorted(exact, key=lambda each: _key(each, order)), tried)

    def _groups(
        self, legal: Iterable[tuple[PlannedLayout, CostPlan]]
    ) -> tuple[list[tuple[float, PlannedLayout, CostPlan, tuple[Recompute, ...]]], int]:
        """Return layouts with every recomputation and the seconds that each needs at least, in
        their order, and how many they are with every stage of ZeRO."""
        groups, tried = [], 0
        for layout, plan in legal:
            for again in self.recomputes:
                every = (again,) * self.blocks
                groups.append((self.timed.least(plan, every), layout, plan, every))
                tried += len(_zero_stages(layout))
        return sorted(groups, key=lambda each: each[0]), tried

    def _by_memory(
        self, legal: Iterable[tuple[PlannedLayout, CostPlan]]
    ) -> tuple[list[tuple[float, PlannedLayout, CostPlan, tuple[Recompute, ...]]], int]:
        """Return layouts with every recomputation and stage of ZeRO, and the bytes that each needs
        at least, in their order; and how many they are."""
        found = [
            (float(least_memory(cut, self.measured, every, self.machine)), named, cut, every)
            for layout, plan in legal
            for every in ((again,) * self.blocks for again in self.recomputes)
            for named, cut in _stages_of_zero(layout, plan, every[0])
        ]
        return sorted(found, key=lambda each: each[0]), len(found)


def check_objective(objective: str) -> None:
    """Raise ValueError for what layouts cannot be ordered by."""
    if objective not in get_args(Objective):
        known = ", ".join(get_args(Objective))
        raise ValueError(f"--objective {objective}: give one of {known}")


def _zero_stages(layout: PlannedLayout) -> tuple[int, ...]:
    """Return the stages of ZeRO; stage 0 has more memory than 1, and sends as much."""
    return (1, 2, 3) if layout.dp * layout.cp > 1 else (0,)


def _limit(
    best: Mapping[tuple, Estimate], layout: PlannedLayout, objective: Objective
) -> tuple[float, ...]:
    """Return the key that a layout must be below to be among the best."""
    if (before := best.get(layout.grid)) is not None:
        return _key(before, objective)
    if len(best) < BEST:
        return (math.inf,)
    return max(_key(each, objective) for each in best.values())


def _stages_of_zero(
    layout: PlannedLayout, plan: CostPlan, again: Recompute
) -> Iterator[tuple[PlannedLayout, CostPlan]]:
    """Yield a layout with the stages of ZeRO."""
    for zero in _zero_stages(layout):
        optimizer = plan.optimizer
        regather = optimizer.regather if zero == 3 else "layer"
        yield (
            replace(layout, zero=zero, recompute=again),
            replace(plan, optimizer=replace(optimizer, zero_stage=zero, regather=regather)),
        )


def _key(estimate: Estimate, objective: Objective) -> tuple[float, float]:
    """Return what layouts are ordered by."""
    seconds, memory = estimate.time.seconds, float(estimate.memory.total)
    if objective == "memory":
        return memory, seconds
    return _cost(seconds, estimate.layout, objective), memory


def _cost(seconds: float, layout: PlannedLayout, objective: Objective) -> float:
    """Return seconds, or for a price those of all devices together."""
    return seconds * layout.ranks if objective == "price" else seconds


def neighbours(layout: PlannedLayout) -> list[tuple[str, PlannedLayout]]:
    """Return layouts of as many ranks that differ in one knob, with its name and new value."""
    own = {"none": 0, "selective": 1, "full": 2}.get(layout.recompute, 0)
    found = [
        (f"parallelism.recompute={way}", replace(layout, recompute=way))
        for way in RECOMPUTES[own + 1 :]
    ]
    if layout.dp * layout.cp > 1:
        found += [
            (f"optimizer.zero_stage={zero}", replace(layout, zero=zero))
            for zero in range(layout.zero + 1, 4)
        ]
    if layout.micro_batch % 2 == 0:
        size = layout.micro_batch // 2
        found.append((f"tokens.micro_batch_size={size}", replace(layout, micro_batch=size)))
    for axis, times in itertools.product(("tp", "pp", "cp"), (2, 4, 8)):
        if layout.dp % times == 0:
            size = getattr(layout, axis) * times
            moved = replace(layout, dp=layout.dp // times, **{axis: size})
            found.append((f"parallelism.{axis}={size}", moved))
    if layout.ep == 1:
        return found
    return [*found, (f"parallelism.ep={2 * layout.ep}", replace(layout, ep=2 * layout.ep))]
