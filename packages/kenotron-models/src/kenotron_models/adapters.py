"""Adapters of a model's weights: which may have one, their tensors, and the form of peft."""

from kenotron_models.adapter import Adapted, adapt
from kenotron_models.adapter_spec import AdapterSpec, adapter_init, peft_module, peft_problems
from kenotron_models.adapter_stacks import stack_factors
from kenotron_models.adapter_targets import linear_parts, targeted
from kenotron_models.peft_config import foreign_keys, rank_and_scale
from kenotron_models.registry import ADAPTER

__all__ = [
    "ADAPTER",
    "Adapted",
    "AdapterSpec",
    "adapt",
    "adapter_init",
    "foreign_keys",
    "linear_parts",
    "peft_module",
    "peft_problems",
    "rank_and_scale",
    "stack_factors",
    "targeted",
]
