"""Activations that decoder layers keep for the backward, and layers that compute them again.

Nothing is allocated: layers are built on torch's meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kenotron_dist import Axis
from kenotron_dist.placement import TensorLayout, parameter_layouts
from kenotron_engine import StageLayers, recompute_within, stages_of
from kenotron_models import (
    Build,
    LayerStack,
    Recompute,
    build_decoder,
    expert_layers,
    kept_bytes,
    layer_costs,
)
from kenotron_pp import NamedLayers, simulate
from kenotron_train.cost.cost_plan import CostPlan, measured_blocks, mesh_sizes


def layer_activation(plan: CostPlan, layer: int, again: Recompute) -> int:
    """Return the bytes that one rank keeps of a micro-batch for the backward of a block.

    The block of the module of `mtp` counts as one more layer.
    """
    return kept_bytes(**measured_block(plan, layer, again), fused_norms=plan.on_accelerator)


def measured_block(plan: CostPlan, layer: int, again: Recompute) -> dict[str, Any]:
    """Return the arguments of ``kept_bytes`` and ``sent_bytes`` for a block of a plan."""
    return {
        "block": measured_blocks(plan.spec)[layer],
        "width": plan.spec.hidden_size,
        "rows": plan.micro_batch_size,
        "sequence": plan.row_tokens,
        "tp": plan.parallelism.tp,
        "mode": plan.parallelism.mode,
        "dtype": plan.dtype,
        "residual": torch.float32 if plan.spec.residual_in_fp32 else None,
        "recompute": again,
    }


@dataclass(frozen=True)
class StageActivations:
    """The layers of each pipeline rank, in one of its tp and dp ranks, on meta."""

    ranks: list[tuple[NamedLayers, StageLayers]]
    """All of them, and which decoder layers are among them."""
    layouts: dict[str, TensorLayout]
    """Of the whole model's parameters."""


def layers_by_rank(plan: CostPlan) -> StageActivations:
    """Return the layers of each pipeline rank."""
    parallel, spec = plan.parallelism, plan.spec
    tp, ep = (  # meta tensors are not communicated
        Axis(name, 0, tuple(range(getattr(parallel, name)))) for name in ("tp", "ep")
    )
    layers = build_decoder(
        spec,
        Build(tp, parallel.mode, dtype=plan.dtype, ep=ep),
        vocab_divisible_by=plan.vocab_divisible_by,
    )
    schedule = parallel.schedule
    stages = stages_of(layers, layer_costs(spec), spec.stage_starts, parallel.pp, schedule)
    layouts = parameter_layouts(
        LayerStack(layers), mesh_sizes(parallel).axis_sizes, stages.of_parameter
    )
    trace = simulate(schedule, parallel.pp, plan.microbatches)
    found: list[tuple[NamedLayers, StageLayers]] = []
    for rank in range(parallel.pp):
        own = stages.own(layers, rank)
        numbers = [int(name.split(".")[1]) for name, _ in own if name.startswith("layers.")]
        numbers += [spec.num_hidden_layers for name, _ in own if name == "mtp.0"]
        live = trace.peak_live[rank] / max(1, schedule.chunks)
        found.append((own, StageLayers(numbers, live)))
    return StageActivations(found, layouts)


def recomputed(plan: CostPlan) -> tuple[Recompute, ...]:
    """Return what each decoder layer computes again in the backward, then the module of `mtp`.

    Raises:
        ValueError: ``parallelism.recompute_memory_gb`` is too small for any choice.
    """
    parallel, depth = plan.parallelism, plan.spec.num_hidden_layers
    if (room := parallel.recompute_memory_gb) is None:
        again = [parallel.recompute_of(layer) for layer in range(depth)]
        experts = expert_layers(plan.spec) if parallel.moe_layer_recompute else ()
        found: list[Recompute] = [
            "feed_forward" if way == "none" and layer in experts else way
            for layer, way in enumerate(again)
        ]
        return (*found, *found[-1:] * len(plan.spec.mtp_blocks))
    stages = [stage for _, stage in layers_by_rank(plan).ranks]
    try:
        return recompute_within(
            room * 1e9, stages, lambda layer, again: layer_activation(plan, layer, again)
        )
    except ValueError as error:
        raise ValueError(
            f"parallelism.recompute_memory_gb: {error}: raise it, lower tokens.micro_batch_size, "
            "or use more tp, cp or pp"
        ) from error
