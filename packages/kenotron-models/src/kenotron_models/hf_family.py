"""What the pages of Hugging Face's architectures have in common: keys, checks, and their form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kenotron_models.hf_rope import rope_from_hf, rope_to_hf
from kenotron_models.registry import AnyConfig
from kenotron_models.spec import DecoderSpec

Values = Mapping[str, Any]
"""The keys of a config.json."""

SLIDING, FULL = "sliding_attention", "full_attention"
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_CHOICES = ("initializer_range", "tie_word_embeddings", "pad_token_id", "bos_token_id")


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of Hugging Face: one page each."""

    model_type: str
    """``model_type`` of its config.json."""
    architecture: str
    """Its class in transformers, of ``architectures``."""
    config: type[AnyConfig]
    """Our config."""
    defaults: Values
    """Keys that a config.json may leave out, and what they are then."""
    only: Mapping[str, Sequence[Any]]
    """Keys that change what is computed, and the values that can be said here."""
    read: Callable[[Values], AnyConfig]
    """Our config from all keys, defaults filled in and ``only`` checked."""
    write: Callable[[DecoderSpec], dict[str, Any]]
    """Its own keys beside those that all have."""
    layer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of a decoder layer that it calls otherwise than Llama."""


def shared_from_hf(values: Values) -> dict[str, Any]:
    """What all families' configs call alike: sizes, heads, tokens, rotary positions.

    Raises ValueError, naming the keys.
    """
    wrong = [
        f"{name}: {values.get(name)!r} was given; it must be a whole number from 1"
        for name in _SIZES
        if type(values.get(name)) is not int or values[name] < 1
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    theta, scaling = rope_from_hf(values)
    ends = values.get("eos_token_id")
    return {
        **{name: values[name] for name in _SIZES},
        **{name: values[name] for name in _CHOICES if name in values},
        "eos_token_id": ends[0] if isinstance(ends, list | tuple) and ends else ends,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def llama_from_hf(values: Values) -> dict[str, Any]:
    """``shared_from_hf`` and what Llama and its descendants have beside it."""
    found = shared_from_hf(values)
    width = found["hidden_size"] // found["num_attention_heads"]
    head = values.get("head_dim")
    return found | {
        "num_key_value_heads": values.get("num_key_value_heads") or found["num_attention_heads"],
        "rms_norm_eps": float(values["rms_norm_eps"]),
        "head_dim": None if head == width else head,
    }


def shared_to_hf(family: Family, config: AnyConfig) -> dict[str, Any]:
    """The keys of config.json that every family has."""
    spec = config.decoder
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: getattr(spec, name) for name in _SIZES},
        "num_key_value_heads": spec.kv_heads,
        "initializer_range": config.initializer_range,
        "use_cache": True,
        "pad_token_id": getattr(config, "pad_token_id", None),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_dropout": spec.attention_dropout,
        **rope_to_hf(spec),
    }


def llama_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """What Llama and its descendants have beside ``shared_to_hf``."""
    return {
        "head_dim": spec.head_dim,
        "hidden_act": "silu" if spec.activation == "silu" and spec.gated else spec.activation,
        "rms_norm_eps": spec.norm_eps,
    }


def windows_from_hf(values: Values) -> dict[str, Any]:
    """Qwen's window and the layers without it. Raises ValueError, naming the key."""
    layers = values["num_hidden_layers"]
    size = values.get("sliding_window") if values.get("use_sliding_window") else None
    first = values["max_window_layers"]
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if size is not None and i >= first else FULL for i in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {SLIDING, FULL}:
        raise ValueError(
            f"layer_types: {kinds} was given; it must be {layers} times {SLIDING} or {FULL}"
        )
    if SLIDING not in kinds:
        return {"sliding_window_size": None}
    if size is None:
        raise ValueError(
            f"layer_types: {SLIDING} was given, but use_sliding_window is false or sliding_window "
            "is null; make them say the same"
        )
    full = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
    return {"sliding_window_size": size, "full_attention_layers": full}


def windows_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """The keys that ``windows_from_hf`` reads."""
    layers = range(spec.num_hidden_layers)
    kinds = [FULL if spec.window_of(i) is None else SLIDING for i in layers]
    return {
        "use_sliding_window": spec.window is not None,
        "sliding_window": spec.window,
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
        "layer_types": kinds,
    }
