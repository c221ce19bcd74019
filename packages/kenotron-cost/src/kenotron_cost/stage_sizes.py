"""Parameters, memory and transfers of every pipeline rank of a run."""

from __future__ import annotations

from dataclasses import dataclass

from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.recomputed import recomputed


@dataclass(frozen=True)
class StageSize:
    """Sizes of what one rank of a pipeline stage holds."""

    layers: list[str]
    parameters: int
    """Parameters of the stage over tp."""
    bytes_of: dict[str, int]
    """Bytes by what they are for."""
    sent: dict[str, int]
    """Bytes that it sends in a step, by axis: for its layers, gradients and parameters."""


def stage_sizes(plan: CostPlan) -> list[StageSize]:
    """Return what each pipeline rank holds in one of its tp and dp ranks."""
    measured, again = MeasuredModel(plan, exact=True), recomputed(plan)
    tensors = measured.tensors(plan)
    return [
        StageSize(
            stage.names,
            sum(each.count * times for each, times in tensors[rank].items()),
            measured.held(plan, rank, again),
            measured.sent_by_stage(plan, rank, again),
        )
        for rank, stage in enumerate(measured.stages(plan))
    ]
