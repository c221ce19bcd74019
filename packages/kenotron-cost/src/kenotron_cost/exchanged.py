"""The micro-batch of a block whose rows are exchanged over cp."""

from __future__ import annotations

from dataclasses import replace

from kenotron_cost.cost_plan import CostPlan
from kenotron_models.block_costs import MetaMicroBatch


def exchanged(plan: CostPlan, batch: MetaMicroBatch, *, keeps: bool = False) -> MetaMicroBatch:
    """Return a micro-batch with the cut over cp, where a block then has other bytes in use.

    Args:
        plan: the layout.
        batch: its micro-batch, as if its tokens were whole rows.
        keeps: only where other bytes are kept, too: those of ulysses.
    """
    if plan.parallelism.cp == 1 or plan.virtual_chunks is not None:
        return batch
    if keeps and plan.cp_way != "ulysses":
        return batch
    cut = plan.cp_mode.cut(plan.sequence, plan.parallelism.cp)
    return replace(batch, cut=cut, way=plan.cp_way, stride=plan.cp_mode.stride)
