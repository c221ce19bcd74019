"""Decoder language models as ordered lists of layers, cut over tensor-parallel ranks."""

from kenotron_models.block_in_shards import virtual_shards
from kenotron_models.build import Build
from kenotron_models.compiled import compile_layers
from kenotron_models.context import Context
from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.describe import describe
from kenotron_models.device_flops import peak_bf16_flops
from kenotron_models.expert_layers import expert_layers
from kenotron_models.families.decoder_keys import ATTENTIONS
from kenotron_models.families.places import cut_sizes
from kenotron_models.family import Family, FamilyConfig, HuggingFace, SizedConfig
from kenotron_models.flops import (
    expert_count,
    forward_flops,
    layer_costs,
    parameter_count,
    training_flops,
)
from kenotron_models.generate import Sampling, generate
from kenotron_models.meta_block import OneKernel, communicating_alike, run_on_meta
from kenotron_models.multipliers import AttentionScale, Fold, Multipliers, folds, multipliers_of
from kenotron_models.mup import DepthRule, Mup, MupOptimizer, ParameterScale, mup_scales
from kenotron_models.mup_init import mup_init, mup_table
from kenotron_models.parameter_init import standard_init
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
from kenotron_models.sequence_cut import SequenceCut
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
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

__all__ = [
    "ATTENTIONS",
    "AnyConfig",
    "Build",
    "Context",
    "DecoderSpec",
    "FAMILIES",
    "Family",
    "FamilyConfig",
    "HuggingFace",
    "LayerStack",
    "OneKernel",
    "Recompute",
    "Sampling",
    "SequenceCut",
    "SizedConfig",
    "SmallSizes",
    "TransformersLayer",
    "TransformersSpec",
    "build_decoder",
    "cache_problem",
    "communicating_alike",
    "compile_layers",
    "component_of",
    "components",
    "config_from_json",
    "cut_sizes",
    "describe",
    "expert_count",
    "expert_layers",
    "family_of",
    "forward_flops",
    "generate",
    "is_tied_copy",
    "layer_costs",
    "layers_on_meta",
    "parameter_count",
    "peak_bf16_flops",
    "plain_model",
    "reported_name",
    "standard_init",
    "training_flops",
    "run_on_meta",
    "sequence_problem",
    "transformers_names",
    "transformers_tensors",
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
    "virtual_shards",
    "whole_row_part",
    "with_values",
]
