"""The layers of a decoder that have experts."""

from __future__ import annotations

from kenotron_models.experts import ExpertsSpec
from kenotron_models.spec import DecoderSpec


def expert_layers(spec: DecoderSpec) -> dict[int, ExpertsSpec]:
    """Return the experts of a decoder by layer, from 0; empty for a dense one."""
    kinds = {i: block.feed_forward for i, block in enumerate(spec.blocks)}
    return {i: kind for i, kind in kinds.items() if isinstance(kind, ExpertsSpec)}
