"""Parts of a model that read whole rows: they are not computed in virtual chunks."""

from __future__ import annotations

from kenotron_models.attention import AttentionSpec
from kenotron_models.experts import ExpertsSpec
from kenotron_models.gated_delta import GatedDeltaSpec
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.mamba import MambaSpec
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.mlp import MLPSpec
from kenotron_models.spec import DecoderSpec

_MIXERS = (AttentionSpec, LatentAttentionSpec, GatedDeltaSpec, MambaSpec, Mamba2Spec)
_FEATURES = 4
"""Features of a head are a multiple: operands of attention begin at addresses that kernels treat
equally."""


def whole_row_part(spec: DecoderSpec) -> str:
    """Name what in a model cannot be computed in virtual chunks; empty: all of it can."""
    for block in dict.fromkeys(spec.blocks):
        mixer, other = block.mixer, block.feed_forward
        if mixer is not None and type(mixer) not in _MIXERS:
            return f"a mixer of kind {mixer.name} ({type(mixer).__name__})"
        if isinstance(mixer, AttentionSpec) and mixer.head_dim % _FEATURES:
            return f"heads of {mixer.head_dim} features, no multiple of {_FEATURES},"
        if other is not None and not isinstance(other, (MLPSpec, ExpertsSpec)):
            return f"a feed-forward of kind {other.name}"
    return ""
