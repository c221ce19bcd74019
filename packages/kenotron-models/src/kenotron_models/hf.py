"""Hugging Face's models, both ways: what config.json says, and the names and rows of tensors.

Each architecture has a page (``hf_llama`` and so on). transformers is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from kenotron_models.hf_family import Family, shared_to_hf
from kenotron_models.hf_llama import LLAMA
from kenotron_models.hf_mistral import MISTRAL
from kenotron_models.hf_qwen2 import QWEN2
from kenotron_models.hf_qwen3 import QWEN3
from kenotron_models.hf_starcoder2 import STARCODER2
from kenotron_models.hf_tensors import Part, Whole, is_superfluous, tensors_of
from kenotron_models.registry import AnyConfig
from kenotron_models.spec import DecoderSpec

__all__ = [
    "Part",
    "Whole",
    "config_from_hf",
    "config_to_hf",
    "differences",
    "hf_tensors",
    "is_superfluous",
    "read_hf_config",
]

CONFIG = "config.json"
ARCHITECTURES = {each.model_type: each for each in (LLAMA, MISTRAL, QWEN2, QWEN3, STARCODER2)}
"""By ``model_type``; a model is written as the first that can say it, after its own."""
OF_THE_RUN = ("attention", "separate_documents", "z_loss")
"""Fields of a spec that do not say what the weights mean: config.json has no word for them."""


def config_from_hf(values: Mapping[str, Any]) -> AnyConfig:
    """Our config of the model that a config.json describes; rotary positions turn halves.

    Raises ValueError, a line for each key that cannot be said here: key, value, what is needed.
    """
    kind = values.get("model_type")
    family = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ValueError(
            f"model_type: {kind!r} was given; it must be one of {', '.join(ARCHITECTURES)}"
        )
    if values.get("quantization_config"):
        raise ValueError(
            "quantization_config: quantised weights were given; only bfloat16, float16 and "
            "float32 can be read: take the model that they were made from"
        )
    filled = {**family.defaults, **values}
    wrong = [
        f"{key}: {filled[key]!r} was given; a {kind} must have {_words(allowed)} here"
        for key, allowed in family.only.items()
        if key in filled and filled[key] not in allowed
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    return family.read(filled)


def read_hf_config(folder: str | Path) -> tuple[AnyConfig, dict[str, Any]]:
    """Our config of the model in a folder of Hugging Face, and what its config.json says.

    Raises ValueError, naming the file and the key; OSError.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is no model of Hugging Face: it has no {CONFIG}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a {type(values).__name__} was found; it must be a mapping")
    try:
        return config_from_hf(values), values
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def config_to_hf(config: AnyConfig) -> dict[str, Any]:
    """The keys of a config.json, without a dtype, of the architecture that says what ours does.

    Its own family is tried first; a Llama with biases is a Qwen2. Rotary keys are in both
    spellings. Raises ValueError, naming the fields, when none computes the same.
    """
    own = next(each for each in ARCHITECTURES.values() if each.config is type(config))
    reasons = []
    for family in (own, *ARCHITECTURES.values()):
        values = shared_to_hf(family, config) | family.write(config.decoder)
        wrong = _unsaid(family, values, config.decoder)
        if not wrong:
            return values
        reasons.append(wrong)
    raise ValueError(
        f"Hugging Face's {own.model_type} cannot say this model, nor can another architecture:\n  "
        + "\n  ".join(reasons[0])
    )


def hf_tensors(config: AnyConfig | DecoderSpec) -> dict[str, Whole]:
    """Our tensors by name, with the tensors of Hugging Face whose rows each is made of."""
    spec = config.decoder
    layer = {} if spec.gated else STARCODER2.layer
    return tensors_of(spec, layer)


def differences(
    ours: DecoderSpec, theirs: DecoderSpec, but: Collection[str] = ("rope_interleaved",)
) -> list[str]:
    """Fields that say what weights mean, and in which two models differ: ``name: a and b``.

    ``but``: fields that do not count; rows of tensors can make up for interleaved positions.
    """
    return [
        f"{each.name}: {_said(getattr(ours, each.name))} and {_said(getattr(theirs, each.name))}"
        for each in fields(DecoderSpec)
        if each.name not in (*OF_THE_RUN, *but)
        and getattr(ours, each.name) != getattr(theirs, each.name)
    ]


def _said(value: Any) -> str:
    """A value as YAML has it where it is nothing, or has keys."""
    if not is_dataclass(value):
        return "null" if value is None else repr(value)
    known = {each.name: getattr(value, each.name) for each in fields(value)}
    return (
        "{" + ", ".join(f"{key}: {said}" for key, said in known.items() if said is not None) + "}"
    )


def _unsaid(family: Family, values: Mapping[str, Any], spec: DecoderSpec) -> list[str]:
    """What is lost when these keys are read again."""
    try:
        found = config_from_hf(values).decoder
    except (ValueError, TypeError) as error:
        return str(error).splitlines()
    slides = any(spec.window_of(i) is not None for i in range(spec.num_hidden_layers))
    meant = spec if slides else replace(spec, window=None, full_attention_layers=())
    return [f"{line} when it is read as {family.model_type}" for line in differences(meant, found)]


def _words(allowed: Any) -> str:
    return " or ".join("null" if value is None else repr(value) for value in allowed)
