"""The largest instant of a step: which line of it has most memory in use, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import get_args

from kenotron_cost.cost_plan import CostPlan, sizes_of
from kenotron_cost.logits import logits_bytes
from kenotron_cost.machine_file import Machine
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.overheads import overheads, rounded_up
from kenotron_cost.stage_tensors import PlannedStage
from kenotron_cost.state_bytes import OFFLOADED, offloaded
from kenotron_models import Recompute
from kenotron_models.block_costs import Working
from kenotron_optim import AdamWConfig

FORWARD = "end of a forward, with the most micro-batches alive"
BACKWARD = "backward of a layer, with the most micro-batches alive"
UPDATE = "optimizer step"
NOT_COUNTED = (
    "gaps between the allocator's blocks, NCCL's buffers to further peers of an all-to-all, "
    "validation and saves"
)
"""Memory that no number here has."""

INTEGERS = 3
"""Integers that a batch has of each token."""
BETWEEN_KERNELS = 3
"""Tensors in fp32 that AdamW has in use for each that it updates, where it is no fused kernel."""
PREFETCHED = 2
"""Further batches in host memory."""


@dataclass(frozen=True)
class PeakMemory:
    """The fullest rank at the instant at which it has most in use."""

    instant: str
    rank: int
    """Of pp."""
    bytes_of: dict[str, int]
    """Bytes by what they are for."""
    layers: dict[str, int] = field(default_factory=dict)
    """Those of its ``activations``, by kind of layer."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.bytes_of.values())


def peak_memory(
    plan: CostPlan,
    measured: MeasuredModel,
    again: Sequence[Recompute],
    machine: Machine | None = None,
) -> PeakMemory:
    """Return the largest instant of the fullest rank.

    Args:
        plan: the layout.
        measured: of its model.
        again: what each block computes again.
        machine: whose constants of what is no tensor count; None: only tensors do.

    Raises:
        ValueError: ``measured`` is of another model, or ``again`` has no way for every block.
    """
    _check(plan, measured, again)
    found = (
        PeakMemory(name, rank, held)
        for rank in measured.differing(plan, again)
        for name, held in zip(
            (FORWARD, BACKWARD, UPDATE),
            instants(plan, measured, again, rank, machine),
            strict=True,
        )
    )
    most = max(found, key=lambda peak: peak.total)
    return replace(most, layers=measured.kept_by_layers(plan, most.rank, again))


def least_memory(
    plan: CostPlan, measured: MeasuredModel, again: Sequence[Recompute], machine: Machine
) -> int:
    """Return bytes that the largest instant is not below, without a block being measured.

    Of what blocks keep, it counts the input of each, which the backward reads; where weights are
    frozen, only that of a block that is computed again. The arguments are those of ``peak_memory``.
    """
    schedule, pp = plan.parallelism.schedule, plan.parallelism.pp
    live = measured.live(schedule, pp, plan.microbatches)
    width = 4 if plan.spec.residual_in_fp32 else plan.dtype.itemsize
    tokens = plan.micro_batch_size * plan.row_tokens
    if plan.parallelism.mode.sequence_parallel:
        tokens //= plan.parallelism.tp
    most = 0
    for rank in measured.differing(plan, again):
        stage, states = measured.stages(plan)[rank], measured.states(plan, rank)
        reads = sum(plan.adapter is None or again[block] == "full" for block in stage.blocks)
        kept = int(live[rank] / max(1, schedule.chunks) * reads * tokens)
        held = sum(states.values()) - (
            offloaded(plan.optimizer, states) if plan.on_accelerator else 0
        )
        ends = logits_bytes(plan) if {"head", "model"} & {*stage.names} else 0
        gathered = sum(_gathered(plan, measured, rank).values())
        inputs = kept * plan.spec.hidden_size * width
        always = sum(overheads(plan, measured, tuple(again), rank, machine).values())
        found = always + held + measured.buckets(plan, rank) + gathered + inputs + ends
        most = max(most, found)
    return most


def instants(
    plan: CostPlan,
    measured: MeasuredModel,
    again: Sequence[Recompute],
    rank: int,
    machine: Machine | None = None,
) -> list[dict[str, int]]:
    """Return the bytes of a rank of pp by what they are for: ``FORWARD``, ``BACKWARD``, ``UPDATE``.

    The other arguments are those of ``peak_memory``, which raises the same errors.
    """
    _check(plan, measured, again)
    if rank not in range(plan.parallelism.pp):
        raise ValueError(f"rank: {rank} was given; parallelism.pp is {plan.parallelism.pp}")
    held = measured.held(plan, rank, again)
    working = measured.of_stage("working", plan, rank, again, partial(_working, measured))
    batches = 1 if plan.on_accelerator else 1 + PREFETCHED
    tokens = plan.micro_batch_size * plan.sequence * INTEGERS * 8
    live = measured.live(plan.parallelism.schedule, plan.parallelism.pp, plan.microbatches)[rank]
    held["inputs"] = plan.microbatches * batches * tokens
    held["inputs"] += min(live, plan.microbatches) * working.shared
    held["buckets"] = measured.buckets(plan, rank)
    if plan.parallelism.pp > 1:  # one arrives while one is used
        width = 4 if plan.spec.residual_in_fp32 else plan.dtype.itemsize
        tokens = plan.micro_batch_size * plan.row_tokens
        held["transfers of pp"] = 2 * tokens * plan.spec.hidden_size * width
    if plan.optimizer.offload and plan.on_accelerator:
        held = {what: size for what, size in held.items() if what not in OFFLOADED}
    activations, logits = held.pop("activations", 0), held.pop("logits", 0)
    ends = measured.ends(plan) if logits else {}
    kept = held | {"activations": activations} | _gathered(plan, measured, rank)
    update = {what: size for what, size in held.items() if what != "sums of samples"}
    rule = plan.optimizer.optimizer_factory
    if isinstance(rule, AdamWConfig) and not rule.torch_adam_is_fused:
        update["update of a tensor"] = BETWEEN_KERNELS * 4 * measured.updated(plan, rank)
    exchanged = min(working.exchanged, working.most)
    layer = {"backward of a layer": working.most - exchanged, "exchange of experts": exchanged}
    every = [kept | ends, kept | layer, update]
    if machine is not None:
        every = _with_overheads(every, plan, measured, tuple(again), rank, machine)
    return [{what: size for what, size in each.items() if size} for each in every]


def _with_overheads(
    every: list[dict[str, int]],
    plan: CostPlan,
    measured: MeasuredModel,
    again: tuple[Recompute, ...],
    rank: int,
    machine: Machine,
) -> list[dict[str, int]]:
    """Return forward, backward and update with what is no tensor.

    What a graph has in use is its own: the update has it, too.
    """
    forward, backward, update = every
    if plan.cuda_graph:
        size = max(map(_total, (forward, backward)))
        own = _total(update) - update.get("update of a tensor", 0)
        update = update | {"pool of the graph": size - own}
    always = overheads(plan, measured, again, rank, machine)
    states, kept = rounded_up(plan, measured, again, rank)
    rounded = (states + kept, states + kept, states)
    return [
        each | always | {"allocator rounding": size}
        for each, size in zip((forward, backward, update), rounded, strict=True)
    ]


def _total(sizes: dict[str, int]) -> int:
    """Return the sum of bytes by what they are for."""
    return sum(sizes.values())


def _check(plan: CostPlan, measured: MeasuredModel, again: Sequence[Recompute]) -> None:
    """Raise ValueError for figures of another model, and for ways that are not one a block."""
    if measured.sizes != sizes_of(plan.spec):
        raise ValueError("measured: it is of another model; give MeasuredModel(plan) of this one")
    if len(again) != len(measured.kinds) or not {*again} <= {*get_args(Recompute)}:
        raise ValueError(
            f"again: give each of the {len(measured.kinds)} blocks one of "
            f"{', '.join(get_args(Recompute))}, as recomputed(plan) does"
        )


def _working(
    measured: MeasuredModel, plan: CostPlan, stage: PlannedStage, again: Sequence[Recompute]
) -> Working:
    """Return the bytes that the backward of a layer has in use beyond what all blocks keep."""
    most, shared = Working(0, 0, 0), 0
    for chunk in stage.chunks:
        behind = 0  # what blocks kept whose backward is over, and this one's, which is in use
        for way, blocks in groupby((measured.kinds[n], again[n]) for n in reversed(chunk)):
            kept, working = measured.kept(plan, *way), measured.working(plan, *way)
            here = working._replace(most=working.most - behind - kept)
            most, shared = max(most, here), max(shared, here.shared)
            behind += kept * len([*blocks])
    return most._replace(shared=shared)


def _gathered(plan: CostPlan, measured: MeasuredModel, rank: int) -> dict[str, int]:
    """Return the bytes of the parameters of a layer and of the next one, where they are cut."""
    optimizer = plan.optimizer
    if not optimizer.zero.cuts_parameters:
        return {}
    elements = measured.elements(plan)
    sizes = sorted(elements[name] for name in measured.stages(plan)[rank].names)
    most = sum(sizes[-2:] if optimizer.regather == "layer" else sizes)
    return {"gathered parameters": most * plan.dtype.itemsize}
