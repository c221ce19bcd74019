"""Time of a step by arithmetic: work of each stage, the schedule's own task graph, transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kenotron_models import KernelWork, Recompute, TransformersBlock, block_flops
from kenotron_pp import Event, Times, simulate
from kenotron_train.cost.cost_plan import CostPlan, measured_blocks
from kenotron_train.cost.machine import OFFLOADED
from kenotron_train.cost.measured import MeasuredModel
from kenotron_train.cost.stage_tensors import PlannedStage
from kenotron_train.plan.machine_file import Machine
from kenotron_train.plan.transfers import seconds_of_sending
from kenotron_train.plan.work import Parts, WorkSeconds, add_parts, parts_of

WORK_KEYS = (
    "peak_flops", "product_efficiency", "attention_efficiency", "memory_bandwidth",
    "kernel_seconds",
)  # fmt: skip
"""Numbers of a machine that times of a rank alone follow from."""
BACKWARD_OF_ATTENTION = 2.5
"""Operations of attention's backward for one of its forward: scores are computed again."""
MOST_EVENTS = 4_000
"""Actions of a pipeline that a search simulates; longer ones continue their steady state."""


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
        sizes = plan.parallelism
        key = "works", sizes.pp, sizes.pp_engine, sizes.pp_chunks, self._cut(plan), tuple(again)
        return self.measured.once(
            key,
            lambda: [self._chunks(plan, each, again) for each in self.measured.stages(plan)],
        )

    def least(self, plan: CostPlan, again: Sequence[Recompute]) -> float:
        """Return seconds that no step of a layout is shorter than: those of its busiest rank."""
        busiest = self.measured.once(
            ("busiest", plan.parallelism.pp, plan.parallelism.pp_engine, plan.parallelism.pp_chunks,
             self._cut(plan), again[0], len({*again})),
            lambda: max(sum(work.total for work in rank) for rank in self.works(plan, again)),
        )  # fmt: skip
        return plan.microbatches * busiest

    def step(self, plan: CostPlan, again: Sequence[Recompute], *, exact: bool = True) -> StepTime:
        """Return the time of a step.

        Args:
            plan: the layout.
            again: what each block computes again.
            exact: simulate every micro-batch, however many there are.
        """
        works, many = self.works(plan, again), plan.microbatches
        busy = [sum(work.total for work in rank) * many for rank in works]
        ticks, bubble = self._pipeline(plan, works, exact)
        ends = [self._after(plan, rank, work) for rank, work in enumerate(works)]
        longest = max(range(len(works)), key=lambda rank: busy[rank] + sum(ends[rank].values()))
        parts = parts_of()
        for work in works[longest]:
            for each in work.parts:
                add_parts(parts, each, many)
        add_parts(parts, ends[longest])
        after = max(sum(each.values()) for each in ends)
        seconds = ticks + after
        parts["bubble"] = max(0.0, seconds - sum(parts.values()))
        return StepTime(seconds, bubble, {what: s for what, s in parts.items() if s})

    def proof(self, plan: CostPlan) -> str:
        """Return where the numbers are from that a layout's times follow from."""
        ranks = plan.parallelism.world_size
        between = ("latency", "node_bandwidth") if ranks > 1 else ()
        nodes = ("network_bandwidth",) if ranks > self.machine.devices else ()
        return self.machine.proof(*WORK_KEYS, *between, *nodes)

    def _chunks(
        self, plan: CostPlan, stage: PlannedStage, again: Sequence[Recompute]
    ) -> list[WorkSeconds]:
        """Return the work of a micro-batch of each part of a rank."""
        found = []
        for chunk in stage.chunks:
            work = WorkSeconds()
            for (kind, way), n in self.measured.ways(chunk, again).items():
                key = "work", kind, way, self._cut(plan)
                one = self.measured.once(key, partial(self._block, plan, kind, way))
                work.add(one, n)
            found.append(work)
        if "head" in stage.names:
            last = plan.parallelism.schedule.place(
                plan.parallelism.pp * plan.parallelism.schedule.chunks - 1, plan.parallelism.pp
            )[1]
            found[last].add(self._head(plan), 1 + len(plan.spec.mtp_blocks))
        return found

    def _cut(self, plan: CostPlan) -> tuple[object, ...]:
        """Return what the work of a micro-batch of a block depends on."""
        sizes = plan.parallelism
        ways = sizes.tp_mode, sizes.tp_linear_async_communication, sizes.ep_chunks
        stage = sizes.dp * sizes.cp * sizes.tp
        return (sizes.tp, sizes.cp, sizes.ep, stage, plan.micro_batch_size, plan.dtype, *ways)

    def _block(self, plan: CostPlan, kind: int, again: Recompute) -> WorkSeconds:
        """Return the work of a block."""
        machine, sizes = self.machine, plan.parallelism
        block = measured_blocks(plan.spec)[self.measured.first[kind]]
        rows, width = plan.micro_batch_size, plan.spec.hidden_size
        given = width, rows, plan.sequence
        counts = [
            self.measured.uneven(
                {"block": block},
                lambda x, what=what: block_flops(x["block"], *given, causal=True)[what],
            )
            for what in range(2)
        ]
        share = sizes.tp * sizes.cp * machine["peak_flops"]
        products = counts[0] / share / machine["product_efficiency"]
        attention = counts[1] / share / machine["attention_efficiency"]
        forward, backward = self.measured.kernels(plan, kind, "none")
        memory, memory_backward = self._moved(forward), self._moved(backward)
        work = WorkSeconds(
            parts_of(products=products, attention=attention, memory=memory),
            parts_of(
                products=products,
                attention=BACKWARD_OF_ATTENTION * attention,
                memory=memory_backward,
            ),
            parts_of(products=products),
        )
        parts = () if isinstance(block, TransformersBlock) else block.parts
        costs = [part.cost(width) for part in parts]
        of_mixer = costs[0] / max(1, sum(costs)) if costs else 0.0
        repeated = self.measured.kernels(plan, kind, again)[1]
        work.inputs["recompute"] = (
            max(0.0, self._moved(repeated) - memory_backward)
            + {
                "none": 0.0,
                "selective": 0.0,
                "full": products + attention,
                "mixer": attention + of_mixer * products,
                "feed_forward": (1 - of_mixer) * products,
            }[again]
        )
        before = self.measured.sent(plan, kind, "none")
        for axis, sent in self.measured.sent(plan, kind, again).items():
            calls = forward.calls.get(axis, 0), repeated.calls.get(axis, 0)
            most = self.measured.imbalance if axis == "ep" else 1.0  # arrives at one rank
            there = seconds_of_sending(machine, most * before[axis] / 2, axis, plan)
            back = seconds_of_sending(machine, most * sent, axis, plan) - there
            for to, seconds, n in zip(
                (work.forward, work.inputs), (there, back), calls, strict=True
            ):
                to[axis] += self._exposed(plan, axis, seconds + n * machine["latency"], products)
        return work

    def _moved(self, work: KernelWork) -> float:
        """Return the seconds of kernels for what they read and write, and for being started."""
        machine = self.machine
        moved = work.nbytes / machine["memory_bandwidth"]
        return moved + work.kernels * machine["kernel_seconds"]

    def _exposed(self, plan: CostPlan, axis: str, seconds: float, products: float) -> float:
        """Return the seconds of a transfer that no product hides."""
        if axis == "tp" and plan.parallelism.tp_linear_async_communication:
            return max(0.0, seconds - products)
        return seconds / plan.parallelism.ep_chunks if axis == "ep" else seconds

    def _head(self, plan: CostPlan) -> WorkSeconds:
        """Return the work of the output layer and the loss."""
        machine, spec = self.machine, plan.spec
        tokens = plan.micro_batch_size * plan.row_tokens
        columns = spec.vocab_size / plan.parallelism.tp
        rate = machine["peak_flops"] * machine["product_efficiency"]
        products = 2 * tokens * spec.hidden_size * columns / rate
        moved = 2 * tokens * columns * (4 + plan.dtype.itemsize) / machine["memory_bandwidth"]
        return WorkSeconds(
            parts_of(products=products, memory=moved),
            parts_of(products=products, memory=moved),
            parts_of(products=products),
        )

    def _pipeline(
        self, plan: CostPlan, works: Sequence[Sequence[WorkSeconds]], exact: bool
    ) -> tuple[float, float]:
        """Return seconds and bubble of all micro-batches in the pipeline."""
        pp, schedule, many = plan.parallelism.pp, plan.parallelism.schedule, plan.microbatches
        if pp == 1 and schedule.chunks == 1:
            return many * works[0][0].total, 0.0
        times, ordered = self._times(plan, works)
        events = 2 * len(ordered) * many
        if exact or events <= MOST_EVENTS:
            trace = simulate(schedule, pp, many, times)
            return trace.ticks, trace.bubble
        few = pp * schedule.chunks
        ticks = [simulate(schedule, pp, n * few, times).ticks for n in (2, 3)]
        total = ticks[1] + (ticks[1] - ticks[0]) * (many / few - 3)
        busy = many * sum(map(sum, ordered))
        return total, max(0.0, 1 - busy / (total * pp))

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
        found["optimizer"] += (held["parameters"] + held["gradients"]) / machine["memory_bandwidth"]
        return found


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
