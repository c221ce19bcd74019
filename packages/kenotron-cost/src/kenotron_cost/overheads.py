"""Bytes of a rank that are no tensors: its process, communicators, segments and graphs."""

from __future__ import annotations

from collections import Counter

from kenotron_cost.allocator import rounding
from kenotron_cost.cost_plan import CostPlan, mesh_sizes
from kenotron_cost.machine_file import Machine
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.stage_tensors import cut_of_data, cut_of_stages
from kenotron_cost.state_bytes import state_blocks
from kenotron_dist import DATA_AXES, counted_mesh, views_of
from kenotron_dist.boxes import gradient_sums
from kenotron_models import Recompute


def overheads(
    plan: CostPlan,
    measured: MeasuredModel,
    again: tuple[Recompute, ...],
    rank: int,
    machine: Machine,
) -> dict[str, int]:
    """Return the bytes that a rank of pp has in use at all times and that are no tensors.

    Args:
        plan: the layout.
        measured: of its model.
        again: what each block computes again.
        rank: of pp.
        machine: whose constants count.
    """
    each = machine["channels"] * machine["channel_buffer"]
    found = {
        "context": int(machine["context"]),
        "communicators": int(each * communicators(plan, measured, rank)),
    }
    if plan.cuda_graph:
        ways = measured.ways(measured.stages(plan)[rank].blocks, again)
        kernels = sum(
            n * sum(work.kernels for work in measured.kernels(plan, *way))
            for way, n in ways.items()
        )
        found["nodes of the graph"] = int(kernels * machine["graph_node"])
    return found


def communicators(plan: CostPlan, measured: MeasuredModel, rank: int) -> int:
    """Return how many communicators of several ranks a rank of pp has in a step.

    A mesh without processes is asked for what a training asks its mesh for. Groups that a
    validation or a checkpoint adds are not among them.
    """
    sizes, shards = mesh_sizes(plan.parallelism), plan.optimizer.shard_ranks
    schedule = plan.parallelism.schedule

    def count() -> int:
        mesh, groups = counted_mesh(sizes, rank * sizes.world_size // sizes.pp)
        if shards is not None and shards != sizes.dp:
            mesh.blocks(DATA_AXES["dense"], shards * sizes.cp)
        ties, sums = _gradient_groups(plan, measured)
        for stages in ties:
            mesh.subset("pp", stages)
        for axis, parts in sums:
            mesh.subaxis(axis, parts)
        # A group of each pair of neighbours is made, its communicator by the first transfer.
        used = {*schedule.neighbours(sizes.pp)}
        return len(groups) + sum(pair in used for pair in mesh.pairs("pp"))

    order = schedule.chunks, schedule.wiring
    return measured.once(("communicators", sizes, shards, order, rank), count)


def rounded_up(
    plan: CostPlan, measured: MeasuredModel, again: tuple[Recompute, ...], rank: int
) -> tuple[int, int]:
    """Return the bytes of segments beyond the states of a rank of pp, and beyond activations.

    On a CPU there are none: its allocator has other rules. Buckets of gradients are taken for one
    block, what is in use in a layer for blocks that come out of free ones.
    """
    if not plan.on_accelerator:
        return 0, 0
    schedule = plan.parallelism.schedule
    live = measured.live(schedule, plan.parallelism.pp, plan.microbatches)[rank]
    stage = measured.stages(plan)[rank]
    parts = -(-live // max(1, schedule.chunks))

    def of_activations() -> int:
        blocks = Counter[int]()
        for way, n in measured.ways(stage.blocks, again).items():
            for size, times in measured.kept_storages(plan, *way).items():
                blocks[size] += times * n * parts
        return rounding(blocks)

    key = f"rounding of {parts}"
    kept = measured.of_stage(key, plan, rank, again, lambda *_: of_activations())
    return _rounding_of_states(plan, measured, rank), kept


def _gradient_groups(
    plan: CostPlan, measured: MeasuredModel
) -> tuple[list[tuple[int, ...]], list[tuple[str, int]]]:
    """Return the stages of pp that own each tied tensor, and axes in parts over each of which
    gradients are summed."""
    sizes = mesh_sizes(plan.parallelism)

    def found() -> tuple[list[tuple[int, ...]], list[tuple[str, int]]]:
        view, layouts = views_of(sizes, 0), measured.layouts(plan).values()
        ties = {tuple(each.stages) for each in layouts if len(each.owners) > 1}
        sums = {(of.axis, of.parts) for x in layouts for of in gradient_sums(x, view(x))}
        return sorted(ties), sorted(sums)

    return measured.once(("gradient groups", sizes.tp, sizes.ep, *cut_of_stages(plan)), found)


def _rounding_of_states(plan: CostPlan, measured: MeasuredModel, rank: int) -> int:
    """Return the bytes that the allocator takes beyond states and buckets of gradients."""

    def rounded() -> int:
        gradients = measured.states(plan, rank)["gradients"]
        blocks = Counter({gradients: 1, measured.buckets(plan, rank): 1})
        for each, times in measured.tensors(plan)[rank].items():
            for size, count in state_blocks(plan, each).items():
                blocks[size] += count * times
        return rounding(blocks)

    key = "rounding", measured.stages(plan)[rank].kind, plan.microbatches, cut_of_data(plan)
    return measured.once(key, rounded)
