"""Keys of a config.json that several families of Hugging Face share, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kenotron_models.attention import AttentionSpec
from kenotron_models.expert_layers import expert_layers
from kenotron_models.experts import ExpertsSpec
from kenotron_models.family import FamilyConfig, HuggingFace, Values
from kenotron_models.hf_rope import FULL, SLIDING, rope_from_hf, rope_to_hf, share_from_hf
from kenotron_models.mlp import MLPSpec
from kenotron_models.spec import DecoderSpec

T = TypeVar("T")
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_CHOICES = ("initializer_range", "tie_word_embeddings", "pad_token_id", "bos_token_id")


def shared_from_hf(values: Values, *, partial: bool = False) -> dict[str, Any]:
    """Keys that the configs of all families share: sizes, heads, tokens, rotary positions.

    ``partial``: a part of a head's features may turn. Raises ValueError, naming the keys.
    """
    wrong = [
        f"{name}: {values.get(name)!r} was given; it must be a whole number from 1"
        for name in _SIZES
        if type(values.get(name)) is not int or values[name] < 1
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    theta, scaling = rope_from_hf(values)
    if (share := share_from_hf(values)) != 1 and not partial:
        raise ValueError(
            f"partial_rotary_factor: {share} was given; whole heads are turned in this family, so "
            "it must be 1"
        )
    ends = values.get("eos_token_id")
    return {
        **{name: values[name] for name in _SIZES},
        **{name: values[name] for name in _CHOICES if name in values},
        "eos_token_id": ends[0] if isinstance(ends, list | tuple) and ends else ends,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def without_rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys without those of rotary positions, for a model that has no positions."""
    return {key: value for key, value in keys.items() if not key.startswith("rope")}


def first_of(spec: DecoderSpec, kind: type[T]) -> T | None:
    """Return the first mixer of a kind; None where no block has one."""
    mixers = (block.mixer for block in spec.blocks)
    return next((mixer for mixer in mixers if isinstance(mixer, kind)), None)


def first_mixer(spec: DecoderSpec) -> AttentionSpec:
    """Return the attention of the first block that has some: config.json has one of most sizes.

    Raises ValueError where no block has any.
    """
    found = first_of(spec, AttentionSpec)
    if found is None:
        raise ValueError("Hugging Face's families of these keys have attention in some layer")
    return found


def first_mlp(spec: DecoderSpec) -> MLPSpec:
    """Return the feed-forward of the first block. Raises ValueError where any block has another."""
    kinds = [block.feed_forward for block in spec.blocks]
    first = kinds[0]
    if not all(isinstance(kind, MLPSpec) for kind in kinds) or not isinstance(first, MLPSpec):
        raise ValueError("Hugging Face's families of these keys have plain feed-forwards only")
    return first


def experts_of(spec: DecoderSpec) -> dict[int, ExpertsSpec]:
    """Return the experts of the layers (from 0) that have some. Raises ValueError for no layer."""
    found = expert_layers(spec)
    if not found:
        raise ValueError("Hugging Face's families of these keys have experts")
    return found


def inner_features(spec: DecoderSpec) -> int:
    """Return the width of the plain feed-forwards; of experts where there are no plain ones."""
    kinds = [block.feed_forward for block in spec.blocks]
    widths = [kind.features for kind in kinds if isinstance(kind, MLPSpec)]
    return (widths or [each.features for each in experts_of(spec).values()])[0]


def windows_of(spec: DecoderSpec) -> list[int | None]:
    """Return the window of each layer."""
    return [getattr(block.mixer, "window", None) for block in spec.blocks]


def _sizes_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    mixer = first_mixer(spec)
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": inner_features(spec),
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": mixer.heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_key_value_heads": mixer.kv_heads,
    }


def llama_from_hf(values: Values, *, partial: bool = False) -> dict[str, Any]:
    """``shared_from_hf`` and what Llama and its descendants add to it."""
    found = shared_from_hf(values, partial=partial)
    width = found["hidden_size"] // found["num_attention_heads"]
    head = values.get("head_dim")
    return found | {
        "num_key_value_heads": values.get("num_key_value_heads") or found["num_attention_heads"],
        "rms_norm_eps": float(values["rms_norm_eps"]),
        "head_dim": None if head == width else head,
    }


def shared_to_hf(hf: HuggingFace, config: FamilyConfig) -> dict[str, Any]:
    """The keys of config.json that every family has."""
    spec = config.decoder
    return {
        "architectures": [hf.architecture],
        "model_type": hf.model_type,
        **_sizes_to_hf(spec),
        "initializer_range": getattr(config, "initializer_range", 0.02),
        "use_cache": True,
        "pad_token_id": getattr(config, "pad_token_id", None),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_dropout": first_mixer(spec).dropout,
        **rope_to_hf(first_mixer(spec).rope),
    }


def llama_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """What Llama and its descendants add to ``shared_to_hf``."""
    return {**sparse_to_hf(spec), "hidden_act": first_mlp(spec).activation}


def sparse_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """What a descendant of Llama with experts adds to ``shared_to_hf`` besides its own keys."""
    return {
        "head_dim": first_mixer(spec).head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm.eps,
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
    kinds = [FULL if size is None else SLIDING for size in windows_of(spec)]
    return {
        "use_sliding_window": spec.window is not None,
        "sliding_window": spec.window,
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
        "layer_types": kinds,
    }
