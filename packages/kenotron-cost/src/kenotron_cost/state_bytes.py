"""Bytes of what a rank keeps between steps, and of what it sends for gradients and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from torch import nn

import kenotron_optim as optim
from kenotron_cost.cost_plan import CostPlan, mesh_sizes
from kenotron_dist import MeshConfig
from kenotron_dist.placement import TensorLayout, named_parameters
from kenotron_models import parameter_count
from kenotron_models.block_costs import expert_parameters
from kenotron_optim import AdamWConfig, Held, OptimizerConfig

OFFLOADED = ("fp32 masters", "optimizer", "weight averages")
"""Parts that `optimizer.offload` keeps in host memory."""
Place = Literal["all", "device", "host"]


def state_of_rank(plan: CostPlan, place: Place = "all") -> float:
    """Mean bytes of what a rank keeps between steps, without a model being built.

    Args:
        plan: of the run.
        place: on a GPU, which bytes: those on it (device), those that are offloaded (host), or all.
    """
    parallel = plan.parallelism
    routed = expert_parameters(plan.spec)
    dense = (parameter_count(plan.spec) - routed) // (parallel.tp * parallel.pp)
    routed //= parallel.ep * parallel.pp
    means = Held(count=dense, matrix=True), Held(count=routed, expert=True, matrix=True)
    sizes = state_bytes(plan, means)
    host = offloaded(plan.optimizer, sizes)
    found = {"all": sum(sizes.values()), "host": host, "device": sum(sizes.values()) - host}
    if place not in found:
        raise ValueError(f"place: {place!r} was given; give one of {', '.join(found)}")
    return float(found[place])


def offloaded(optimizer: OptimizerConfig, sizes: Mapping[str, int]) -> int:
    """Bytes of ``state_bytes`` that are in host memory where ranks compute on GPUs."""
    return sum(sizes.get(what, 0) for what in OFFLOADED) if optimizer.offload else 0


def state_bytes(plan: CostPlan, tensors: Iterable[Held]) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients and optimizer state, for some of its tensors."""
    sizes = mesh_sizes(plan.parallelism)
    return optim.state_bytes(tensors, plan.optimizer, sizes, plan.dtype.itemsize, plan.leaves)


def state_blocks(plan: CostPlan, tensor: Held) -> dict[int, int]:
    """Count the blocks of a tensor's parameters, masters and moments on a device by their bytes."""
    sizes, found = state_bytes(plan, [tensor]), Counter[int]()
    moments = 2 if isinstance(plan.optimizer.optimizer_factory, AdamWConfig) else 1
    for what in ("parameters", *OFFLOADED):
        if not (plan.optimizer.offload and what in OFFLOADED):
            count = moments if what == "optimizer" else 1
            found[sizes.get(what, 0) // count] += count
    return found


def bucket_bytes(plan: CostPlan, tensors: Iterable[Held]) -> int:
    """Bytes of a rank's buckets of gradients that are filled or sent."""
    if plan.leaves is not None:  # exchanged after the last backward
        return 0
    given = plan.optimizer, mesh_sizes(plan.parallelism), plan.dtype.itemsize, plan.microbatches
    return optim.bucket_bytes(tensors, *given, plan.bucket_mb, gloo=not plan.on_accelerator)


def sent_over_data(plan: CostPlan, tensors: Iterable[Held]) -> dict[str, int]:
    """Bytes that a rank sends in a step for gradients and parameters, by data axis."""
    sizes, width = mesh_sizes(plan.parallelism), plan.dtype.itemsize
    given = plan.optimizer, sizes, width, plan.microbatches, plan.leaves
    return optim.data_bytes(tensors, *given)


def stage_tensors(
    stage: nn.Module,
    layouts: Mapping[str, TensorLayout],
    sizes: MeshConfig,
    pp_rank: int,
    optimizer: OptimizerConfig,
) -> list[Held]:
    """Describe the parameters of the first rank of a pipeline stage.

    Args:
        stage: its layers under their global names, on meta.
        layouts: of the whole model.
        sizes: of the mesh.
        pp_rank: place of the stage.
        optimizer: which rule updates them.
    """
    first = pp_rank * sizes.world_size // sizes.pp
    rule = optimizer.optimizer_factory
    return optim.held_tensors(named_parameters(stage), layouts, sizes, first, rule)
