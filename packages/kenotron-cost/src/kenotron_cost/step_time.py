"""Time of a step by arithmetic: work of each stage, the schedule's own task graph, transfers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.machine_file import Machine
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.stage_tensors import STEADY, PlannedStage
from kenotron_cost.state_bytes import OFFLOADED
from kenotron_cost.work import (
    Parts,
    WorkSeconds,
    add_parts,
    block_work,
    head_work,
    parts_of,
    seconds_of_sending,
    sending_work,
)
from kenotron_models import Recompute
from kenotron_pp import Event, Times, pipeline_time, rank_actions, simulate

WORK_KEYS = (
    "peak_flops", "product_efficiency", "attention_efficiency", "memory_bandwidth",
    "kernel_seconds",
)  # fmt: skip
"""Numbers of a machine that times of a rank alone follow from."""
MOST_EVENTS = 4_000
"""Actions of a pipeline that a search simulates; longer ones continue their steady state."""
GRADIENT_PASSES = 2
"""Times that a step reads all gradients after the last backward: for the norm, and the update."""
ROUNDING = 1e-9
"""Share by which sums of the same seconds in another order may differ."""


@dataclass(frozen=True)
class StepTime:
    """Time of a step, and of the rank that works longest."""

    seconds: float
    bubble: float
    """Share of all ranks' time in the pipeline in which a rank waits, as ``simulate`` has it."""
    parts: dict[str, float]
    """Seconds of the longest rank by what they are for, those in which it waits included."""


class TimedModel:
    """Times of a model's layers on a machine.

    Args:
        measured: the model.
        machine: the machine.
    """

    def __init__(self, measured: MeasuredModel, machine: Machine) -> None:
        self.measured, self.machine = measured, machine

    def works(self, plan: CostPlan, again: Sequence[Recompute]) -> list[list[WorkSeconds]]:
        """Return the work of a micro-batch of each part of each rank of pp."""
        return [self._rank(plan, stage, again) for stage in self.measured.stages(plan)]

    def least(self, plan: CostPlan, again: Sequence[Recompute]) -> float:
        """Return seconds that no step of a layout is shorter than.

        A rank works on all micro-batches after the first one has passed the stages before, and
        before the last one passes them again. Weight gradients that are apart may come after that.
        """
        schedule, many = plan.parallelism.schedule, plan.microbatches
        works = self.works(plan, again)
        found = arrives = returns = 0.0
        for own in works:  # whose first parts are the first stages, in order
            forward, inputs, weights = (sum(work.seconds[i] for work in own) for i in range(3))
            busy, split = many * (forward + inputs + weights), many * weights * schedule.splits
            found = max(found, arrives + max(busy, busy - split + returns))
            first = own[0].seconds
            arrives += first[0]
            returns += first[1] + (0.0 if schedule.splits else first[2])
        return found if len(works) == 1 else found / self.machine.sharing * (1 - ROUNDING)

    def step(self, plan: CostPlan, again: Sequence[Recompute], *, exact: bool = True) -> StepTime:
        """Return the time of a step.

        Args:
            plan: the layout.
            again: what each block computes again.
            exact: simulate every micro-batch, however many there are.
        """
        works, many = self.works(plan, again), plan.microbatches
        sizes = plan.parallelism
        key = "pipeline", sizes.pp, sizes.pp_engine, sizes.pp_chunks, sizes.world_size, many, exact
        ticks, bubble = self.measured.once(
            (*key, tuple(again), self._cut(plan)),
            lambda: self._shared(*self._pipeline(plan, works, exact)),
        )
        ends = self._ends(plan, again)
        busy = {rank: sum(work.total for work in works[rank]) * many for rank in ends}
        longest = max(ends, key=lambda rank: busy[rank] + sum(ends[rank].values()))
        parts = parts_of()
        for work in works[longest]:
            for each in work.parts:
                add_parts(parts, each, many)
        add_parts(parts, ends[longest])
        seconds = ticks + _longest(ends)
        if (busiest := sum(parts.values())) > seconds and self.machine.sharing > 1:
            parts = parts_of({what: each * seconds / busiest for what, each in parts.items()})
        parts["bubble"] = max(0.0, seconds - sum(parts.values()))
        return StepTime(seconds, bubble, {what: s for what, s in parts.items() if s})

    def after(self, plan: CostPlan, again: Sequence[Recompute]) -> float:
        """Return the seconds of a step after its last micro-batch; the others are in ``least``."""
        return _longest(self._ends(plan, again))

    def proof(self, plan: CostPlan) -> str:
        """Return where the numbers are from that a layout's times follow from."""
        ranks = plan.parallelism.world_size
        between = ("latency", "node_bandwidth") if ranks > 1 else ()
        nodes = ("network_bandwidth",) if ranks > self.machine.devices else ()
        return self.machine.proof(*WORK_KEYS, *between, *nodes)

    def _rank(
        self, plan: CostPlan, stage: PlannedStage, again: Sequence[Recompute]
    ) -> list[WorkSeconds]:
        """Return the work of a micro-batch of each part of a rank."""
        cut, once = self._cut(plan), self.measured.once

        def made() -> list[WorkSeconds]:
            found = []
            for chunk in stage.chunks:
                found.append(WorkSeconds())
                for (kind, way), n in self.measured.ways(chunk, again).items():
                    make = partial(block_work, self.machine, self.measured, plan, kind, way)
                    found[-1].add(once(("work", kind, way, cut), make), n)
            if "head" in stage.names:
                found[-1].add(head_work(self.machine, plan), 1 + len(plan.spec.mtp_blocks))
            for name, ways in self.measured.ends_sent(plan, stage).items():
                at = 0 if name == "embedding" else -1
                found[at].add(sending_work(self.machine, plan, *ways))
            return found

        return once(("rank", stage.kind, tuple(again[n] for n in stage.blocks), cut), made)

    def _cut(self, plan: CostPlan) -> tuple[Hashable, ...]:
        """Return what the work of a micro-batch of a block depends on."""
        sizes = plan.parallelism
        ways = sizes.tp_mode, sizes.tp_linear_async_communication, sizes.ep_chunks
        return sizes.tp, sizes.cp, sizes.ep, plan.micro_batch_size, plan.dtype, *ways

    def _pipeline(
        self, plan: CostPlan, works: Sequence[Sequence[WorkSeconds]], exact: bool
    ) -> tuple[float, float]:
        """Return seconds and bubble of all micro-batches in the pipeline."""
        pp, schedule, many = plan.parallelism.pp, plan.parallelism.schedule, plan.microbatches
        if pp == 1 and schedule.chunks == 1:
            return many * works[0][0].total, 0.0
        times, ordered = self._times(plan, works)
        events = 2 * len(ordered) * many
        actions = partial(self.measured.actions, schedule, pp)
        if events <= MOST_EVENTS:
            return pipeline_time(schedule, actions(many), times)
        if exact:
            return pipeline_time(schedule, rank_actions(schedule, pp, many), times)
        few = pp * schedule.chunks
        ticks = [pipeline_time(schedule, actions(n * few), times)[0] for n in STEADY]
        total = ticks[1] + (ticks[1] - ticks[0]) * (many / few - 3)
        busy = many * sum(map(sum, ordered))
        return total, max(0.0, 1 - busy / (total * pp))

    def _shared(self, ticks: float, bubble: float) -> tuple[float, float]:
        """Return both where ranks share cores: those that wait leave theirs to the others."""
        if self.machine.sharing == 1:
            return ticks, bubble
        busy = ticks * (1 - bubble)
        ticks = max(busy, ticks / self.machine.sharing)
        return ticks, 1 - busy / ticks

    def events(self, plan: CostPlan, again: Sequence[Recompute], rank: int) -> list[Event]:
        """Return what a rank of pp does in a step, in its order."""
        sizes = plan.parallelism
        times, _ = self._times(plan, self.works(plan, again))
        trace = simulate(sizes.schedule, sizes.pp, plan.microbatches, times)
        return [event for event in trace.timeline if event.rank == rank]

    def _times(
        self, plan: CostPlan, works: Sequence[Sequence[WorkSeconds]]
    ) -> tuple[Times, list[tuple[float, float, float]]]:
        """Return the seconds of the actions of a pipeline, and those of each stage in order."""
        pp, schedule = plan.parallelism.pp, plan.parallelism.schedule
        stages: dict[int, WorkSeconds] = {
            schedule.stage(rank, chunk, pp): work
            for rank, own in enumerate(works)
            for chunk, work in enumerate(own)
        }
        ordered = [stages[stage].seconds for stage in range(len(stages))]
        forward, inputs, weights = map(list, zip(*ordered, strict=True))
        times = Times(
            F=forward,
            B=[i + w for i, w in zip(inputs, weights, strict=True)],
            I=inputs,
            W=weights,
            transfer=self._transfer(plan),
        )
        return times, ordered

    def _transfer(self, plan: CostPlan) -> float:
        """Return the seconds between a stage and the next one."""
        sizes, tokens = plan.parallelism, plan.micro_batch_size * plan.row_tokens
        width = 4 if plan.spec.residual_in_fp32 else plan.dtype.itemsize
        sent = tokens * plan.spec.hidden_size * width
        sent //= sizes.tp if sizes.mode.sequence_parallel else 1
        inside = sizes.world_size <= self.machine.devices
        rate = self.machine["node_bandwidth" if inside else "network_bandwidth"]
        return self.machine["latency"] + sent / rate

    def _ends(self, plan: CostPlan, again: Sequence[Recompute]) -> dict[int, Parts]:
        """Return the seconds after the last micro-batch of ranks of pp that stand for all."""
        works = self.works(plan, again)
        ranks = self.measured.differing(plan, again)
        return {rank: self._after(plan, rank, works[rank]) for rank in ranks}

    def _after(self, plan: CostPlan, rank: int, works: Sequence[WorkSeconds]) -> Parts:
        """Return the seconds that a step of a rank has besides its micro-batches."""
        machine, optimizer = self.machine, plan.optimizer
        held = self.measured.states(plan, rank)
        found = parts_of()
        for axis, sent in self.measured.sent_over_data(plan, rank).items():
            seconds = seconds_of_sending(machine, sent, axis, plan) + 2 * machine["latency"]
            found[axis] = max(0.0, seconds - _behind(plan, works))
        moved = sum(2 * held[what] for what in OFFLOADED if what in held)
        place = "host_bandwidth" if optimizer.offload else "memory_bandwidth"
        found["optimizer"] = moved / machine[place]
        passes = held["parameters"] + GRADIENT_PASSES * held["gradients"]
        found["optimizer"] += passes / machine["memory_bandwidth"]
        return found


def _longest(ends: Mapping[int, Parts]) -> float:
    """Return the seconds of the rank that has most."""
    return max(sum(each.values()) for each in ends.values())


def _behind(plan: CostPlan, works: Sequence[WorkSeconds]) -> float:
    """Return the seconds of computation behind which gradients and parameters travel.

    Those of stages 0 and 1 are added up in the backward of the last micro-batch, and parameters are
    gathered in the forward of the next step's first one. Stage 2 adds gradients of every
    micro-batch, stage 3 gathers the parameters of each.
    """
    optimizer = plan.optimizer
    forward = sum(work.seconds[0] for work in works)
    backward = sum(sum(work.seconds[1:]) for work in works)
    if optimizer.zero.cuts_gradients and optimizer.reduce == "micro_batch":
        backward *= plan.microbatches
    if optimizer.zero.cuts_parameters and optimizer.regather == "layer":
        forward *= plan.microbatches
    return forward + backward


def described_parts(parts: Mapping[str, float], count: int = 2) -> str:
    """Return the largest shares of a step: ``products 61 %, bubble 14 %``."""
    total = sum(parts.values())
    largest = sorted(parts.items(), key=lambda each: -each[1])[:count]
    return ", ".join(f"{what} {seconds / total:.0%}" for what, seconds in largest)
