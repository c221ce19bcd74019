"""Decoder language models as ordered lists of layers, cut over tensor-parallel ranks."""

from kenotron_models.attention import Attention, AttentionSpec
from kenotron_models.block import Block, BlockSpec
from kenotron_models.build import Build
from kenotron_models.communication import sent_bytes
from kenotron_models.compiled import compile_layers
from kenotron_models.context import Context
from kenotron_models.decoder import Head, LayerStack, build_decoder
from kenotron_models.describe import describe
from kenotron_models.device_flops import peak_bf16_flops
from kenotron_models.embedding import Embedding
from kenotron_models.expert_layers import expert_layers
from kenotron_models.experts import Experts, ExpertsSpec
from kenotron_models.families.decoder_keys import ATTENTIONS
from kenotron_models.families.deepseek_v3 import DeepseekV3Config
from kenotron_models.families.gemma import Gemma2Config, Gemma3Config
from kenotron_models.families.glm4_moe import Glm4MoEConfig
from kenotron_models.families.gpt_oss import GptOssConfig
from kenotron_models.families.granite_hybrid import GraniteHybridConfig
from kenotron_models.families.jamba import JambaConfig
from kenotron_models.families.llama import LlamaConfig
from kenotron_models.families.llamoe import LlaMoEConfig
from kenotron_models.families.mamba import MambaModelConfig
from kenotron_models.families.mamba2 import Mamba2ModelConfig
from kenotron_models.families.mistral import MistralConfig
from kenotron_models.families.mixtral import MixtralConfig
from kenotron_models.families.moe_config import MoEConfig
from kenotron_models.families.nemotron_h import NemotronHConfig
from kenotron_models.families.olmo2 import OLMo2Config, OLMo3Config
from kenotron_models.families.olmoe import OLMoEConfig
from kenotron_models.families.phi3 import Phi3Config
from kenotron_models.families.places import cut_sizes
from kenotron_models.families.qwen2 import Qwen2Config
from kenotron_models.families.qwen3 import Qwen3Config
from kenotron_models.families.qwen3_moe import Qwen3MoEConfig
from kenotron_models.families.qwen3_next import Qwen3NextConfig
from kenotron_models.families.smollm3 import SmolLM3Config
from kenotron_models.families.starcoder2 import Starcoder2Config
from kenotron_models.families.transformers_config import TransformersConfig
from kenotron_models.families.upcycled import router_shapes, upcycled_config, upcycled_name
from kenotron_models.family import Family, FamilyConfig, HuggingFace, SizedConfig
from kenotron_models.flops import (
    expert_parameters,
    forward_flops,
    layer_costs,
    parameter_count,
    training_flops,
)
from kenotron_models.gated_delta import GatedDeltaSpec
from kenotron_models.generate import Sampling, generate
from kenotron_models.kv_cache import KVCache
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.mamba import MambaSpec
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.memory import kept_bytes
from kenotron_models.mlp import MLP, MLPSpec
from kenotron_models.multipliers import AttentionScale, Fold, Multipliers, folds, multipliers_of
from kenotron_models.mup import DepthRule, Mup, MupOptimizer, ParameterScale, mup_scales
from kenotron_models.mup_init import mup_init, mup_table
from kenotron_models.norm import LayerNorm, NormSpec, RMSNorm
from kenotron_models.parameter_init import standard_init
from kenotron_models.part import Part, PartSpec, Sparse
from kenotron_models.recompute import Recompute
from kenotron_models.registry import (
    FAMILIES,
    AnyConfig,
    config_from_json,
    family_of,
    model_from_json,
    model_to_json,
)
from kenotron_models.reported_names import component_of, components, reported_name
from kenotron_models.rope import Rope, rotary_angles, rotate
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.router import Choice, Router, RouterSpec, choose
from kenotron_models.sequence_cut import SequenceCut
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
from kenotron_models.stacked_linear import StackedLinear
from kenotron_models.transformers_layers import TransformersLayer
from kenotron_models.transformers_meta import layers_on_meta
from kenotron_models.transformers_names import (
    is_tied_copy,
    transformers_names,
    transformers_tensors,
)
from kenotron_models.transformers_spec import TransformersSpec

__all__ = [
    "ATTENTIONS",
    "AnyConfig",
    "Attention",
    "AttentionSpec",
    "Block",
    "BlockSpec",
    "Build",
    "Choice",
    "Context",
    "DecoderSpec",
    "DeepseekV3Config",
    "Embedding",
    "Experts",
    "ExpertsSpec",
    "FAMILIES",
    "Family",
    "FamilyConfig",
    "GatedDeltaSpec",
    "Gemma2Config",
    "Gemma3Config",
    "Glm4MoEConfig",
    "GptOssConfig",
    "GraniteHybridConfig",
    "Head",
    "HuggingFace",
    "JambaConfig",
    "KVCache",
    "LatentAttentionSpec",
    "LayerNorm",
    "LayerStack",
    "LlaMoEConfig",
    "LlamaConfig",
    "MLP",
    "MLPSpec",
    "Mamba2ModelConfig",
    "Mamba2Spec",
    "MambaModelConfig",
    "MambaSpec",
    "MistralConfig",
    "MixtralConfig",
    "MoEConfig",
    "NemotronHConfig",
    "NormSpec",
    "OLMo2Config",
    "OLMo3Config",
    "OLMoEConfig",
    "Part",
    "PartSpec",
    "Phi3Config",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoEConfig",
    "Qwen3NextConfig",
    "RMSNorm",
    "Recompute",
    "Rope",
    "RopeScaling",
    "Router",
    "RouterSpec",
    "Sampling",
    "SequenceCut",
    "SizedConfig",
    "SmallSizes",
    "SmolLM3Config",
    "Sparse",
    "StackedLinear",
    "Starcoder2Config",
    "TransformersConfig",
    "TransformersLayer",
    "TransformersSpec",
    "build_decoder",
    "choose",
    "compile_layers",
    "component_of",
    "components",
    "config_from_json",
    "cut_sizes",
    "describe",
    "expert_layers",
    "expert_parameters",
    "family_of",
    "forward_flops",
    "generate",
    "is_tied_copy",
    "kept_bytes",
    "layer_costs",
    "layers_on_meta",
    "parameter_count",
    "peak_bf16_flops",
    "reported_name",
    "rotary_angles",
    "rotate",
    "router_shapes",
    "sent_bytes",
    "standard_init",
    "training_flops",
    "transformers_names",
    "transformers_tensors",
    "upcycled_config",
    "upcycled_name",
    "AttentionScale",
    "Fold",
    "Multipliers",
    "folds",
    "multipliers_of",
    "DepthRule",
    "Mup",
    "MupOptimizer",
    "ParameterScale",
    "model_from_json",
    "model_to_json",
    "mup_init",
    "mup_scales",
    "mup_table",
]
