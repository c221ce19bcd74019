"""A config.json of Hugging Face: its text, sizes and kinds of values, checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kenotron_models.family import Values
from kenotron_models.spec import MOST_LAYERS

MOST_EXPERTS = 1_000_000
"""Experts of all layers together."""
_PER_LAYER = ("layer_types", "layers_block_type", "hybrid_override_pattern", "no_rope_layers")
_LAYERS = "num_hidden_layers"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip
_WEIGHTS = ("bfloat16", "float16", "float32")
_ENDS = "_token_id"
_MAY_BE_NULL = (
    "sliding_window", "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping",
    "num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "attention_bias",
    "initializer_range", "router_jitter_noise", "partial_rotary_factor", "resid_pdrop",
    "attention_dropout", "embedding_dropout", "residual_dropout", "intermediate_size",
)  # fmt: skip


def read_json(path: Path) -> Any:
    """Return what a JSON file says.

    Raises:
        ValueError: it is not JSON, or nested too deeply; the message names the file.
        OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not read: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def size_problems(values: Values) -> list[str]:
    """Name numbers of layers and of experts that no model has, before anything is built of them."""
    counts = {name: len(values[name]) for name in _PER_LAYER if _is_list(values.get(name))}
    if type(given := values.get(_LAYERS)) is int:
        counts[_LAYERS] = given
    found = [
        f"{name}: {count} layers were given; a model may have {MOST_LAYERS}"
        for name, count in counts.items()
        if count > MOST_LAYERS
    ]
    layers = max(counts.values(), default=1)
    return found + [
        f"{name}: {values[name]} were given; all layers together may have {MOST_EXPERTS} experts"
        for name in _EXPERTS
        if not found and type(values.get(name)) is int and values[name] * layers > MOST_EXPERTS
    ]


def kind_problems(defaults: Values, only: Values, values: Values) -> list[str]:
    """Name values that are no number, or no truth value, where the default is one.

    Args:
        defaults: values of the keys that may be left out.
        only: keys whose values are checked one by one.
        values: those given, with the defaults filled in.
    """
    found = []
    for name, usual in defaults.items():
        value = values[name]
        if name in only or name.endswith(_ENDS) or usual is None:
            continue
        if value is None and name in _MAY_BE_NULL and usual is not True:
            continue
        if isinstance(usual, bool):
            wrong, needed = not isinstance(value, bool), "true or false"
        elif isinstance(usual, int | float):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            wrong, needed = not (number and math.isfinite(value)), "a finite number"
        else:
            continue
        if wrong:
            said = "null" if value is None else repr(value)
            found.append(f"{name}: {said} was given; it must be {needed}, or be left out")
    return found


def hf_dtype(values: Mapping[str, Any]) -> str | None:
    """Return the dtype of weights that a config.json names; None: it names none.

    Raises:
        ValueError: it is none that can be read here.
    """
    key = "dtype" if values.get("dtype") is not None else "torch_dtype"
    given = values.get(key)
    inner = given.get("") if isinstance(given, Mapping) else given  # of all other modules
    if inner is None or inner == "auto":
        return None
    name = str(inner).removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if name not in _WEIGHTS:
        raise ValueError(f"{key}: {given!r} was given; it must be one of {', '.join(_WEIGHTS)}")
    return name


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | str)
