"""The parts of each block that a run computes again in the backward."""

from __future__ import annotations

from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.measured import MeasuredModel
from kenotron_engine import StageLayers, recompute_within
from kenotron_models import Recompute, expert_layers


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
    measured, chunks = MeasuredModel(plan, exact=True), max(1, parallel.schedule.chunks)
    live = measured.live(parallel.schedule, parallel.pp, plan.microbatches)
    stages = [
        StageLayers(stage.blocks, most / chunks)
        for stage, most in zip(measured.stages(plan), live, strict=True)
    ]
    try:
        return recompute_within(
            room * 1e9, stages, lambda n, again: measured.kept(plan, measured.kinds[n], again)
        )
    except ValueError as error:
        raise ValueError(
            f"parallelism.recompute_memory_gb: {error}: raise it, lower tokens.micro_batch_size, "
            "or use more tp, cp or pp"
        ) from error
