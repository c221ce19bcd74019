"""Parameters, memory and transfers of every pipeline rank, by arithmetic.

Nothing is allocated: layers are built on torch's meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kenotron_engine import way_of
from kenotron_models import LayerStack, Recompute, sent_bytes
from kenotron_tp import tokens_at_a_time
from kenotron_train.cost.activations import (
    layer_activation,
    layers_by_rank,
    measured_block,
    recomputed,
)
from kenotron_train.cost.cost_plan import CostPlan, measured_blocks, mesh_sizes
from kenotron_train.cost.machine import sent_over_data, stage_tensors, state_bytes


@dataclass(frozen=True)
class StageSize:
    """Sizes of what one rank of a pipeline stage holds."""

    layers: list[str]
    parameters: int
    """Parameters of the stage over tp."""
    bytes_of: dict[str, int]
    """Bytes by what they are for."""
    sent: dict[str, int]
    """Bytes that it sends in a step, by axis: for its blocks, gradients and parameters."""


def stage_sizes(plan: CostPlan) -> list[StageSize]:
    """Return what each pipeline rank holds in one of its tp and dp ranks."""
    sizes = mesh_sizes(plan.parallelism)
    found, counted = list[StageSize](), bool(measured_blocks(plan.spec))
    again, stages = recomputed(plan), layers_by_rank(plan)
    for rank, (own, stage) in enumerate(stages.ranks):
        count = sum(p.numel() for _, layer in own for p in layer.parameters())
        tensors = stage_tensors(LayerStack(own), stages.layouts, sizes, rank, plan.optimizer)
        nbytes = state_bytes(plan, tensors)
        if counted:
            kept = sum(layer_activation(plan, i, again[i]) for i in stage.layers)
            nbytes["activations"] = int(stage.live * kept)
        if any(name in ("head", "model") for name, _ in own):
            nbytes["logits"] = logits_bytes(plan)
        sent = _sent(plan, stage.layers, again) if counted else {}
        sent |= sent_over_data(plan, tensors)
        found.append(StageSize([name for name, _ in own], count, nbytes, sent))
    return found


def logits_bytes(plan: CostPlan) -> int:
    """Return the bytes of the logits that exist at a time, and on accelerators of their softmax."""
    tokens = plan.micro_batch_size * plan.row_tokens
    width = plan.spec.vocab_size // plan.parallelism.tp
    place, nbytes = "cpu", 4
    if plan.on_accelerator:
        place, nbytes = "cuda", 4 + plan.dtype.itemsize
    return nbytes * width * min(tokens, tokens_at_a_time(tokens, width, place))


def _sent(plan: CostPlan, layers: Sequence[int], again: Sequence[Recompute]) -> dict[str, int]:
    """Bytes that one rank sends over tp, cp and ep for some blocks in a step."""
    spec, parallel, sent = plan.spec, plan.parallelism, Counter[str]()
    for layer in layers:
        sent += Counter(
            sent_bytes(
                **measured_block(plan, layer, again[layer]),
                ep=parallel.ep,
                cut=plan.cp_mode.cut(plan.sequence, parallel.cp),
                way=way_of(plan.cp_mode, spec, parallel.grid),
            )
        )
    return {name: n * plan.microbatches for name, n in sent.items()}
