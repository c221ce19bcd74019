"""Every key of transformers' config classes, changed one at a time, on tiny models.

A key is what the config class has: the list grows with transformers. A model with the changed key
is drawn, saved, read here and compared; or reading it is refused by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_cases
import torch

from kenotron_ckpt import open_safetensors
from kenotron_models.hf_import import compare_import, read_model

BASES = {
    "llama": "llama-tied-llama3",
    "mistral": "mistral-window",
    "qwen2": "qwen2-window",
    "qwen3": "qwen3",
    "starcoder2": "starcoder2",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2-moe",
    "qwen3_moe": "qwen3-moe-tied",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron-h",
    "qwen3_next": "qwen3-next",
    "jamba": "jamba",
    "granitemoehybrid": "granite-hybrid",
    "deepseek_v3": "deepseek-v3-yarn",
    "olmoe": "olmoe",
    "smollm3": "smollm3",
    "phi3": "phi3-tied-partial-window",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4-moe",
}
"""The model of each architecture that keys are changed in."""
FAULT = "fault"
ANYWAY = {
    "architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder",
    "label2id", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    "torch_dtype", "transformers_version",
}  # fmt: skip
"""Keys of every config class, not of a model of text."""


@dataclass(frozen=True)
class Change:
    """One key with another value."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}"


def changes(model_type: str) -> Iterator[Change]:
    """All keys of an architecture's config class, each with some other values."""
    kind, own = hf_cases.CASES[BASES[model_type]]
    values = hf_cases.config_of(BASES[model_type]).to_dict()
    for key in dict.fromkeys([*_names(kind), *own]):
        if key in ANYWAY or key.startswith("_"):
            continue
        for other in others(key, values.get(key)):
            yield Change(key, other)


def _names(kind: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(kind)]


def others(key: str, value: Any) -> list[Any]:
    """Other values of the same kind; no value where there was one."""
    if key.endswith("_token_id"):
        return [5]
    if key == "vocab_size":
        return [211]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1] if value else [1, 2]
    if isinstance(value, float):
        return [value * 2 + 0.25, value / 4] if value else [0.25]
    if isinstance(value, str):
        return [_SAME_KIND.get(value, "gelu" if "act" in key else value + "x")]
    if isinstance(value, Mapping):
        return [{**value, inner: other} for inner in value for other in others(inner, value[inner])]
    if isinstance(value, list | tuple) and value:
        rest = list(value)
        return [rest[::-1], rest[1:] + rest[:1], rest[:1] * len(rest)]
    return [True, 1, 3, 0.5]  # of a key that has no value


_SAME_KIND = {"silu": "gelu", "random": "constant", "default": "linear"}


def check(model_type: str, change: Change, folder: Path) -> tuple[str, str]:
    """Compare a model with one key changed.

    Returns:
        ``equal``, ``refused``, ``invalid`` where transformers has no such model, or ``FAULT``; and
        what was said.
    """
    case = BASES[model_type]
    try:
        torch.manual_seed(0)
        model = hf_cases.make(case, **{change.key: change.value})
        model(hf_cases.TOKENS % model.config.vocab_size, use_cache=False)
        model.save_pretrained(folder)
    except Exception as error:  # transformers has no such model
        return "invalid", f"{type(error).__name__}: {error}"
    try:
        source = read_model(open_safetensors(folder))
    except ValueError as error:
        keys = [change.key, *(change.value if isinstance(change.value, Mapping) else ())]
        named = any(re.search(rf"\b{re.escape(key)}\b", str(error)) for key in keys)
        return ("refused" if named else FAULT), str(error)
    except Exception as error:
        return FAULT, f"{type(error).__name__}: {error}"
    try:
        found = compare_import(source)
    except ValueError as error:
        return FAULT, str(error)
    return "equal", f"{found:.1e}"


def without_one(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A config.json without each of its keys, and of the keys of its rotary positions."""
    for key in values.keys() - {"model_type", *ANYWAY}:
        yield key, {name: value for name, value in values.items() if name != key}
        if isinstance(values[key], Mapping):
            for inner in values[key]:
                rest = {name: value for name, value in values[key].items() if name != inner}
                yield f"{key}.{inner}", {**values, key: rest}
