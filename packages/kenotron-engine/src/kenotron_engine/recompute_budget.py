"""Layers that compute activations again, so that what is kept fits in a given memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kenotron_models import Recompute

MORE: tuple[Recompute, ...] = ("selective", "full")
"""Ways to keep less, the cheaper one first: selective computes no matrix product again."""


@dataclass(frozen=True)
class StageLayers:
    """Decoder layers of a pipeline rank."""

    layers: Sequence[int]
    """Their numbers."""
    live: float
    """Micro-batches whose activations each of them keeps at a time."""


def recompute_within(
    room: float, stages: Sequence[StageLayers], kept: Callable[[int, Recompute], int]
) -> tuple[Recompute, ...]:
    """Choose for each decoder layer, so that every pipeline rank keeps at most ``room`` bytes.

    The first layers of a rank are selective, as few as are enough; where all of them are not, the
    first ones are full.

    Args:
        room: bytes of a rank for activations of decoder layers.
        stages: the layers of each pipeline rank; together all layers of the model.
        kept: bytes that a layer keeps of a micro-batch, by its number and what it computes again.

    Returns:
        What each layer computes again, in order.

    Raises:
        ValueError: a rank keeps more even where all of its layers are full.
    """
    chosen: dict[int, Recompute] = {}
    for rank, stage in enumerate(stages):
        for layer in stage.layers:
            chosen[layer] = "none"
        needed = stage.live * sum(kept(layer, "none") for layer in stage.layers)
        steps = [(layer, again) for again in MORE for layer in stage.layers]
        for layer, again in steps:
            if needed <= room:
                break
            needed += stage.live * (kept(layer, again) - kept(layer, chosen[layer]))
            chosen[layer] = again
        if needed > room:
            raise ValueError(
                f"{room / 1e9:.4g} GB were given for activations; pipeline rank {rank} keeps "
                f"{needed / 1e9:.4g} GB even where all layers compute everything again"
            )
    return tuple(chosen[layer] for layer in range(len(chosen)))
