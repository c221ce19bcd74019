"""Layers and what describes them, for models of one's own."""

from kenotron_models.attention import Attention, AttentionSpec
from kenotron_models.block import Block, BlockSpec
from kenotron_models.decoder import Head
from kenotron_models.embedding import Embedding
from kenotron_models.experts import Experts, ExpertsSpec
from kenotron_models.gated_delta import GatedDeltaSpec
from kenotron_models.kv_cache import KVCache
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.mamba import MambaSpec
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.mlp import MLP, MLPSpec
from kenotron_models.norm import LayerNorm, NormSpec, RMSNorm
from kenotron_models.part import Part, PartSpec, Sparse
from kenotron_models.rope import Rope, rotary_angles, rotate
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.router import Choice, Router, RouterSpec, choose
from kenotron_models.stacked_linear import StackedLinear

__all__ = [
    "Attention",
    "AttentionSpec",
    "Block",
    "BlockSpec",
    "Choice",
    "Embedding",
    "Experts",
    "ExpertsSpec",
    "GatedDeltaSpec",
    "Head",
    "KVCache",
    "LatentAttentionSpec",
    "LayerNorm",
    "MLP",
    "MLPSpec",
    "Mamba2Spec",
    "MambaSpec",
    "NormSpec",
    "Part",
    "PartSpec",
    "RMSNorm",
    "Rope",
    "RopeScaling",
    "Router",
    "RouterSpec",
    "Sparse",
    "StackedLinear",
    "choose",
    "rotary_angles",
    "rotate",
]
