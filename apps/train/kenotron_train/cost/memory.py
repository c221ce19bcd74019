"""The largest instant of a step: which line of it has most memory in use, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kenotron_models import Recompute
from kenotron_train.cost.cost_plan import CostPlan
from kenotron_train.cost.machine import OFFLOADED
from kenotron_train.cost.measured import MeasuredModel

FORWARD = "end of a forward, with the most micro-batches alive"
BACKWARD = "backward of a layer, with the most micro-batches alive"
UPDATE = "optimizer step"
NOT_COUNTED = (
    "buckets of gradients, tensors inside of a layer's forward and backward, an uneven load of "
    "experts, validation and saves"
)
"""Memory that no number here has; part of it is in the constant ``reserved``."""


@dataclass(frozen=True)
class PeakMemory:
    """The fullest rank at the instant at which it has most in use."""

    instant: str
    rank: int
    """Of pp."""
    bytes_of: dict[str, int]
    """Bytes by what they are for."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.bytes_of.values())


def peak_memory(
    plan: CostPlan, measured: MeasuredModel, again: Sequence[Recompute], reserved: float = 0.0
) -> PeakMemory:
    """Return the largest instant of the fullest rank.

    Args:
        plan: the layout.
        measured: of its model.
        again: what each block computes again.
        reserved: bytes that are never tensors.
    """
    found = (
        PeakMemory(name, rank, held)
        for rank in range(plan.parallelism.pp)
        for name, held in zip(
            (FORWARD, BACKWARD, UPDATE),
            instants(plan, measured, again, rank, reserved),
            strict=True,
        )
    )
    return max(found, key=lambda peak: peak.total)


def instants(
    plan: CostPlan, measured: MeasuredModel, again: Sequence[Recompute], rank: int, reserved: float
) -> list[dict[str, int]]:
    """Return the bytes of a rank of pp by what they are for: ``FORWARD``, ``BACKWARD``, ``UPDATE``.

    The other arguments are those of ``peak_memory``.
    """
    held = measured.held(plan, rank, again) | {"reserved": int(reserved)}
    if plan.optimizer.offload and plan.on_accelerator:
        held = {what: size for what, size in held.items() if what not in OFFLOADED}
    moving = {what: held.pop(what) for what in ("activations", "logits") if what in held}
    backward = {"activations": moving.get("activations", 0)} | _working(plan, measured, again, rank)
    every = (held | moving, held | backward, held)
    return [{what: size for what, size in each.items() if size} for each in every]


def _working(
    plan: CostPlan, measured: MeasuredModel, again: Sequence[Recompute], rank: int
) -> dict[str, int]:
    """Return the bytes of what the backward of a layer has in use for itself."""
    stage, optimizer = measured.stages(plan)[rank], plan.optimizer
    ways = measured.ways(stage.blocks, again)
    found = {
        "recomputed layer": max(
            (measured.kept(plan, kind, "none") - measured.kept(plan, kind, way))
            for kind, way in ways
        )
        if ways
        else 0
    }
    elements = measured.elements(plan)
    largest = max(elements[name] for name in stage.names)
    if optimizer.zero.cuts_parameters and optimizer.regather == "layer":
        found["gathered parameters"] = 2 * largest * plan.dtype.itemsize  # of it and the next one
    if optimizer.zero.cuts_gradients and optimizer.reduce == "micro_batch":
        summed = 4 if optimizer.accumulate_grad_in_fp32 else plan.dtype.itemsize
        found["gradients of a layer"] = largest * summed
    return found
