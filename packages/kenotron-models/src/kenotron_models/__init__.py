"""Decoder language models as ordered lists of layers, cut over tensor-parallel ranks."""

from kenotron_models.adapter import Adapted, adapt
from kenotron_models.adapter_spec import AdapterSpec, adapter_init, peft_module, peft_problems
from kenotron_models.adapter_stacks import stack_factors
from kenotron_models.adapter_targets import linear_parts, targeted
from kenotron_models.block_in_shards import virtual_shards
from kenotron_models.block_kernels import Kernels, KernelWork, block_kernels
from kenotron_models.build import Build
from kenotron_models.communication import sent_bytes, sequence_bytes
from kenotron_models.compiled import compile_layers
from kenotron_models.context import Context
from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.describe import describe
from kenotron_models.device_flops import peak_bf16_flops
from kenotron_models.expert_layers import expert_layers
from kenotron_models.families.decoder_keys import ATTENTIONS
from kenotron_models.families.places import cut_sizes
from kenotron_models.families.upcycled import router_shapes, upcycled_config, upcycled_name
from kenotron_models.family import Family, FamilyConfig, HuggingFace, SizedConfig
from kenotron_models.flops import (
    block_flops,
    expert_count,
    expert_parameters,
    forward_flops,
    layer_costs,
    parameter_count,
    training_flops,
)
from kenotron_models.generate import Sampling, generate
from kenotron_models.memory import kept_bytes, norm_bytes
from kenotron_models.meta_block import MetaMicroBatch
from kenotron_models.multipliers import AttentionScale, Fold, Multipliers, folds, multipliers_of
from kenotron_models.mup import DepthRule, Mup, MupOptimizer, ParameterScale, mup_scales
from kenotron_models.mup_init import mup_init, mup_table
from kenotron_models.parameter_init import standard_init
from kenotron_models.peft_config import foreign_keys, rank_and_scale
from kenotron_models.recompute import Recompute
from kenotron_models.registry import (
    ADAPTER,
    FAMILIES,
    AnyConfig,
    config_from_json,
    family_of,
    model_from_json,
    model_to_json,
)
from kenotron_models.reported_names import component_of, components, reported_name
from kenotron_models.sequence_cut import SequenceCut
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
from kenotron_models.transformers_block import TransformersBlock, transformers_blocks
from kenotron_models.transformers_layers import TransformersLayer
from kenotron_models.transformers_meta import layers_on_meta
from kenotron_models.transformers_model import plain_model
from kenotron_models.transformers_names import (
    is_tied_copy,
    transformers_names,
    transformers_tensors,
)
from kenotron_models.transformers_problems import cache_problem, sequence_problem
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_models.virtual_chunks import split_chunks
from kenotron_models.whole_rows import whole_row_part
from kenotron_models.with_values import with_values
from kenotron_models.working_memory import working_bytes

__all__ = [
    "ADAPTER",
    "ATTENTIONS",
    "Adapted",
    "AdapterSpec",
    "AnyConfig",
    "Build",
    "Context",
    "DecoderSpec",
    "FAMILIES",
    "Family",
    "FamilyConfig",
    "HuggingFace",
    "Kernels",
    "KernelWork",
    "LayerStack",
    "MetaMicroBatch",
    "Recompute",
    "Sampling",
    "SequenceCut",
    "SizedConfig",
    "SmallSizes",
    "TransformersBlock",
    "TransformersLayer",
    "TransformersSpec",
    "adapt",
    "adapter_init",
    "block_flops",
    "block_kernels",
    "build_decoder",
    "cache_problem",
    "compile_layers",
    "component_of",
    "components",
    "config_from_json",
    "cut_sizes",
    "describe",
    "expert_count",
    "expert_layers",
    "expert_parameters",
    "family_of",
    "forward_flops",
    "generate",
    "is_tied_copy",
    "kept_bytes",
    "norm_bytes",
    "layer_costs",
    "layers_on_meta",
    "linear_parts",
    "parameter_count",
    "peak_bf16_flops",
    "foreign_keys",
    "peft_module",
    "peft_problems",
    "plain_model",
    "rank_and_scale",
    "reported_name",
    "router_shapes",
    "sent_bytes",
    "sequence_bytes",
    "standard_init",
    "targeted",
    "training_flops",
    "sequence_problem",
    "transformers_blocks",
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
    "split_chunks",
    "stack_factors",
    "virtual_shards",
    "whole_row_part",
    "with_values",
    "working_bytes",
]
