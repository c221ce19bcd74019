"""Rules on the adapter_config.json of an adapter of peft: what is computed here as peft does.

Training from such an adapter and merging it into a model have these rules in common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PEFT_PREFIX = "base_model.model."
"""Begins the names of tensors that peft writes."""
COMPUTED = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "init_lora_weights",
)  # fmt: skip
"""Keys that say how an adapter is computed, and have rules of their own."""
FREE = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "target_modules", "target_parameters", "exclude_modules",
    "layers_to_transform", "layers_pattern", "fan_in_fan_out", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
)  # fmt: skip
"""Keys that do not change what an adapter computes once it is loaded: its tensors say the rest."""
KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which peft leaves the weights of the model as they are."""
MERGE = "leave it out and train again, or merge the adapter with merge_and_unload of peft"


def foreign_keys(values: Mapping[str, Any]) -> list[str]:
    """Name the keys of an adapter_config.json that are not computed here; one line each.

    A key that this version does not know is one of them, unless it is empty.
    """
    found = []
    if values.get("peft_type") != "LORA":
        found.append(f"peft_type is {values.get('peft_type')!r}, and it must be 'LORA'")
    if (begins := values.get("init_lora_weights")) not in KEEPS_BASE:
        found.append(
            f"init_lora_weights is {begins!r}, which changes the model's own weights when peft "
            "loads the adapter: convert it (save_pretrained of peft with "
            "path_initial_model_for_weight_conversion), or merge it with merge_and_unload of peft"
        )
    return found + [
        f"{key} is {value!r}, which is not computed here: {MERGE}"
        for key, value in sorted(values.items())
        if key not in COMPUTED + FREE and value and value != "none"
    ]


def rank_and_scale(values: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return the rank of a module's adapter, and the factor of what it adds.

    Args:
        values: an adapter_config.json without ``foreign_keys``.
        module: name in the model, as ``model.layers.0.self_attn.q_proj``.

    Raises:
        ValueError: a key is missing or is no such number.
    """
    rank, alpha = (
        _of_module(values.get(pattern) or {}, module, values.get(key))
        for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    )
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"r (or rank_pattern) is {rank!r} for {module}, and it must be above 0")
    if not isinstance(alpha, int | float):
        raise ValueError(f"lora_alpha (or alpha_pattern) is {alpha!r} for {module}, no number")
    return rank, alpha / (rank**0.5 if values.get("use_rslora") else rank)


def _of_module(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
