"""Hugging Face's models, both ways: what config.json says, and the names and rows of tensors.

Each family says its own names (``kenotron_models.families``). transformers is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron_models import registry
from kenotron_models.families.hf_keys import (
    allowed_values,
    keys_to_hf,
    read_config,
    table_defaults,
)
from kenotron_models.family import HuggingFace
from kenotron_models.hf_comparison import Wanted, compare, load_theirs
from kenotron_models.hf_config_file import hf_dtype, kind_problems, read_json, size_problems
from kenotron_models.hf_tensors import (
    EMBEDDING,
    HEAD,
    TensorPart,
    Whole,
    cast,
    stays_fp32,
    tensors_of,
)
from kenotron_models.hub_folder import hub_folder, missing
from kenotron_models.peft_config import PEFT_PREFIX
from kenotron_models.registry import AnyConfig, family_of
from kenotron_models.shapes import decoder_layouts
from kenotron_models.spec import DecoderSpec
from kenotron_models.spec_differences import differences

__all__ = [
    "CONFIG",
    "EMBEDDING",
    "HEAD",
    "PEFT_PREFIX",
    "TensorPart",
    "Wanted",
    "Whole",
    "cast",
    "compare",
    "config_from_hf",
    "config_to_hf",
    "differences",
    "exported_tensors",
    "hf_dtype",
    "hf_tensors",
    "hub_folder",
    "is_superfluous",
    "load_theirs",
    "not_carried",
    "read_hf_config",
    "read_json",
    "stays_fp32",
    "turns_neighbours",
    "with_its_head",
]

CONFIG = "config.json"
"""Name of the file that describes a model of Hugging Face."""
_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old files hold next to the weights: they are computed again."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
OF_A_TRAINING = (
    "z_loss_enabled", "z_loss_coefficient", "router_aux_loss_coef", "router_aux_loss_type",
    "router_z_loss_coef", "router_bias_rate", "router_jitter_noise", "expert_capacity_factor",
)  # fmt: skip
"""Keys of a config that only a training reads."""


def config_from_hf(values: Mapping[str, Any]) -> AnyConfig:
    """Our config of the model that a config.json describes; rotary positions turn halves.

    Raises ValueError, a line for each key that cannot be said here: key, value, what is needed.
    """
    name, known = values.get("model_type"), {each.model_type: (each, of) for each, of in _known()}
    if not isinstance(name, str) or name not in known:
        given = "nothing" if name is None else repr(name)
        raise ValueError(
            f"model_type: {given} was given; it must be one of {', '.join(known)}; others train "
            "with is_hf_config: true, without an import"
        )
    family, kind = known[name]
    if values.get("quantization_config"):
        raise ValueError(
            "quantization_config: quantised weights were given; only bfloat16, float16 and "
            "float32 can be read: take the model that they were made from"
        )
    defaults, only = {**table_defaults(kind), **family.defaults}, allowed_values(kind, family)
    filled = {**defaults, **values}
    if wrong := size_problems(filled) or kind_problems(defaults, only, filled):
        raise ValueError("\n".join(wrong))
    wrong = [
        f"{key}: {filled[key]!r} was given; a {name} must have {_words(allowed)} here"
        for key, allowed in only.items()
        if key in filled and filled[key] not in allowed
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    try:
        return read_config(kind, filled) if family.read is None else family.read(filled)
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(
            f"a value of the config.json of a {name} has another type than transformers writes "
            f"({type(error).__name__}: {error}): compare it with the file of a published model"
        ) from error


def read_hf_config(folder: str | Path) -> tuple[AnyConfig, dict[str, Any]]:
    """Our config of the model in a folder of Hugging Face, and what its config.json says.

    Raises ValueError, naming the file and the key; OSError.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        reason = f"it has no {CONFIG}" if Path(folder).is_dir() else "there is no such folder"
        hint = missing(str(folder))
        raise ValueError(f"{folder} is no model of Hugging Face: {reason}{hint}")
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a {type(values).__name__} was found; it must be a mapping")
    try:
        return config_from_hf(values), values
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def with_its_head(config: AnyConfig, same: Callable[[str, str], bool | None]) -> AnyConfig:
    """The config without a tie when the folder has a head that is not its embedding.

    transformers does not tie such a model either, whatever its config.json says. ``same``: whether
    two tensors of the folder are equal; None when one is not there.
    """
    if not config.decoder.tie_word_embeddings or same(*_ends(config)) is not False:
        return config
    return replace(config, tie_word_embeddings=False)


def config_to_hf(config: AnyConfig) -> dict[str, Any]:
    """The keys of a config.json, without a dtype, of the architecture that says what ours does.

    Its own family is tried first; a Llama with biases is a Qwen2. Rotary keys are in both
    spellings. Raises ValueError, naming the fields, when none computes the same.
    """
    own, others = _names_of(config), family_of(config).others
    reasons, mine = [], [(each, type(config)) for each in (own, *others)]
    for family, kind in (*mine, *_known()):
        try:
            values = keys_to_hf(kind, family, config)
        except ValueError as error:  # other parts than the family's
            reasons.append(str(error).splitlines())
            continue
        spec = config.decoder
        if not family.ties:  # the head is written next to the embedding that it is
            spec = replace(spec, tie_word_embeddings=False)
        wrong = _unsaid(family, values, spec) or _other_names(own, family, config)
        if not wrong:
            return values
        reasons.append(wrong)
    of_its_own = reasons[: 1 + len(others)]
    raise ValueError(
        f"Hugging Face's {own.model_type} cannot say this model, nor can another architecture:\n  "
        + "\n  ".join(dict.fromkeys(line for lines in of_its_own for line in lines))
    )


def _known() -> list[tuple[HuggingFace, type[Any]]]:
    """Return Hugging Face's names of the families that it has, and the classes of their configs."""
    own = [(each.hf, each.config) for each in registry.FAMILIES if each.hf is not None]
    return [*own, *((other, each.config) for each in registry.FAMILIES for other in each.others)]


def _names_of(config: AnyConfig) -> HuggingFace:
    family = family_of(config)
    if family.hf is None:
        raise ValueError(f"Hugging Face has no {family.config.__name__.removesuffix('Config')}")
    return family.hf


def hf_tensors(config: AnyConfig, *, interleaved: bool | None = None) -> dict[str, Whole]:
    """Return our tensors by name, with the tensors of Hugging Face whose rows each is made of.

    Args:
        config: the model; its family names the tensors.
        interleaved: whether our rotary positions turn neighbouring features; None: as it says.
    """
    own = _names_of(config)
    return tensors_of(config, own.names, own.outside, interleaved=interleaved)


def exported_tensors(config: AnyConfig, values: Mapping[str, Any]) -> dict[str, Whole]:
    """Return ``hf_tensors``, and the head of a tied model that transformers does not tie.

    Args:
        config: the model.
        values: the keys of the config.json that is written with it.
    """
    found = hf_tensors(config)
    family = next(each for each, _ in _known() if each.model_type == values["model_type"])
    if not config.decoder.tie_word_embeddings or family.ties:
        return found
    whole = found[EMBEDDING]
    head = replace(whole.parts[0], name=family.outside.head)
    return found | {EMBEDDING: replace(whole, parts=(*whole.parts, head))}


def _ends(config: AnyConfig) -> tuple[str, str]:
    """Return Hugging Face's names of the embedding and the head."""
    return (own := _names_of(config).outside).embedding, own.head


def is_superfluous(name: str, config: AnyConfig) -> bool:
    """Return True for a tensor of a file that the model does not have but that is allowed there."""
    spec, layer = config.decoder, _LAYER.match(name)
    beyond = layer is not None and int(layer[1]) >= spec.num_hidden_layers
    further = beyond and _names_of(config).further_layers
    tied = spec.tie_word_embeddings and name == _ends(config)[1]
    return bool(_BUFFERS.fullmatch(name)) or tied or further


def not_carried(config: AnyConfig) -> list[str]:
    """Name what a training reads and a config.json of the model does not say: ``key: value``.

    transformers has one balance loss, that of all layers, whatever was trained with.
    """
    ours, theirs = _training_keys(config), _training_keys(config_from_hf(config_to_hf(config)))
    if ours.get("router_aux_loss_coef"):
        theirs["router_aux_loss_type"] = "all_layers"
    if not ours.get("z_loss_enabled"):
        ours.pop("z_loss_coefficient", None)
    return [f"{key}: {value}" for key, value in ours.items() if value != theirs.get(key)]


def _training_keys(config: AnyConfig) -> dict[str, Any]:
    """Values of the keys that only a training reads, of a config and of its experts."""
    parts = [part for part in (config, getattr(config, "moe_config", None)) if part is not None]
    return {
        key: getattr(part, key) for part in parts for key in OF_A_TRAINING if hasattr(part, key)
    }


def turns_neighbours(spec: DecoderSpec) -> bool:
    """Return whether rotary positions turn neighbouring features in any block."""
    ropes = [getattr(block.mixer, "rope", None) for block in spec.blocks]
    return any(rope is not None and rope.interleaved for rope in ropes)


def _unsaid(family: HuggingFace, values: Mapping[str, Any], spec: DecoderSpec) -> list[str]:
    """List the differences that remain when these keys are read again."""
    try:
        found = config_from_hf(values).decoder
    except (ValueError, TypeError) as error:
        return str(error).splitlines()
    return [f"{line} when it is read as {family.model_type}" for line in differences(spec, found)]


def _other_names(own: HuggingFace, family: HuggingFace, config: AnyConfig) -> list[str]:
    """List the modules that have other names in another family: tensors keep those of their own."""
    modules = {
        path.rpartition(".")[0].split(".", 2)[2]
        for path in decoder_layouts(config.decoder)
        if path.startswith("layers.")
    }
    return [
        f"{module} has other names in a {family.model_type}"
        for module in sorted(modules)
        if own.names.get(module) != family.names.get(module)
    ]


def _words(allowed: Any) -> str:
    return " or ".join("null" if value is None else repr(value) for value in allowed)
