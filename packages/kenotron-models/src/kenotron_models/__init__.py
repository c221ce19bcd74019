"""Decoder language models as ordered lists of layers, cut over tensor-parallel ranks."""

from kenotron_models.attention import Attention
from kenotron_models.config import LlamaConfig, RopeScaling
from kenotron_models.decoder import Context, DecoderLayer, LayerStack, build_decoder
from kenotron_models.flops import forward_flops, parameter_count, training_flops
from kenotron_models.generate import generate
from kenotron_models.mlp import GatedMLP
from kenotron_models.norm import RMSNorm
from kenotron_models.parametrization import layer_costs, standard_init
from kenotron_models.rope import rotary_angles, rotate

__all__ = [
    "Attention",
    "Context",
    "DecoderLayer",
    "GatedMLP",
    "LayerStack",
    "LlamaConfig",
    "RMSNorm",
    "RopeScaling",
    "build_decoder",
    "forward_flops",
    "generate",
    "layer_costs",
    "parameter_count",
    "rotary_angles",
    "rotate",
    "standard_init",
    "training_flops",
]
