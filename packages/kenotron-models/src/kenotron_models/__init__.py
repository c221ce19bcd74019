"""Decoder language models as ordered lists of layers, cut over tensor-parallel ranks."""

from kenotron_models.attention import Attention
from kenotron_models.compiled import compile_layers
from kenotron_models.config import LlamaConfig
from kenotron_models.config_mistral import MistralConfig
from kenotron_models.config_qwen2 import Qwen2Config
from kenotron_models.config_qwen3 import Qwen3Config
from kenotron_models.config_starcoder2 import Starcoder2Config
from kenotron_models.context import Context
from kenotron_models.decoder import Head, LayerStack, build_decoder
from kenotron_models.decoder_layer import DecoderLayer
from kenotron_models.embedding import Embedding
from kenotron_models.flops import forward_flops, parameter_count, training_flops
from kenotron_models.generate import Sampling, generate
from kenotron_models.kv_cache import KVCache
from kenotron_models.mlp import MLP
from kenotron_models.norm import LayerNorm, RMSNorm
from kenotron_models.parametrization import layer_costs, standard_init
from kenotron_models.peak import peak_bf16_flops
from kenotron_models.recompute import Recompute
from kenotron_models.registry import config_from_json
from kenotron_models.rope import rotary_angles, rotate
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.spec import Architecture, DecoderSpec

__all__ = [
    "MLP",
    "Architecture",
    "Attention",
    "Context",
    "DecoderLayer",
    "DecoderSpec",
    "Embedding",
    "Head",
    "KVCache",
    "LayerNorm",
    "LayerStack",
    "LlamaConfig",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "RMSNorm",
    "Recompute",
    "Sampling",
    "RopeScaling",
    "Starcoder2Config",
    "build_decoder",
    "compile_layers",
    "config_from_json",
    "forward_flops",
    "generate",
    "layer_costs",
    "parameter_count",
    "rotary_angles",
    "rotate",
    "standard_init",
    "peak_bf16_flops",
    "training_flops",
]
