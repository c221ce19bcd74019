"""OLMo-2 (arXiv 2501.00656) and OLMo-3: norms after attention and feed-forward, not before."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.fields import SharedFields, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import first_mixer, llama_from_hf, llama_to_hf
from kenotron_models.families.layer_types import (
    LayerTypeFields,
    positive_problems,
    ropes_to_hf,
    types_from_hf,
    types_to_hf,
)
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_rope import ropes_by_type
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused
from kenotron_models.norm import NormSpec
from kenotron_models.spec import DecoderSpec

OLMO3_THETA = 500000.0
"""Base of the rotary wave lengths of an OLMo-3 where a config.json says none."""


@dataclass(frozen=True, kw_only=True)
class OLMo2Config(SharedFields):
    """Sizes and constants of an OLMo-2 decoder, under Hugging Face's names.

    Queries are normed over all heads together, and so are keys.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_olmo2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    attention_bias: bool = False
    """True: queries, keys, values and the output have a bias."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        raise_all([*check(self), *marker_problems(self, "is_olmo2_config")])

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        return _normed_after(self, [_mixer(self)] * self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class OLMo3Config(LayerTypeFields):
    """Sizes and constants of an OLMo-3 decoder: an OLMo-2, of which most layers have a window.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_olmo3_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    attention_bias: bool = False
    """True: queries, keys, values and the output have a bias."""
    rope_theta: float = OLMO3_THETA
    """Base of the rotary wave lengths; rope_scaling stretches those of full layers only."""
    rope_local_base_freq: float | None = None
    """The base in sliding layers; None: rope_theta."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        base = positive_problems({"rope_local_base_freq": self.rope_local_base_freq})
        found = [*check(self), *self.type_problems(), *base]
        raise_all([*found, *marker_problems(self, "is_olmo3_config")])

    def pattern(self) -> tuple[str, ...]:
        """Return the types of all layers where the config does not say them."""
        return self.every_nth_full(4)

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer, base = _mixer(self), self.rope_local_base_freq or self.rope_theta
        assert mixer.rope is not None  # all layers have positions
        local = replace(mixer, rope=replace(mixer.rope, theta=base, scaling=None))
        return _normed_after(self, self.by_type(mixer, local))


def _mixer(config: SharedFields) -> AttentionSpec:
    norm = NormSpec(eps=config.rms_norm_eps)
    bias = config.attention_bias
    return replace(config.attention(), qk_norm=norm, qk_norm_over="width", out_bias=bias)


def _normed_after(config: SharedFields, mixers: Sequence[AttentionSpec]) -> DecoderSpec:
    spec = config.decoder_of(mixers)
    return replace(spec, blocks=tuple(replace(block, norms="after") for block in spec.blocks))


def _read(values: Values) -> OLMo2Config:
    return OLMo2Config(**llama_from_hf(values), attention_bias=bool(values["attention_bias"]))


def _read_types(values: Values) -> OLMo3Config:
    known = ropes_by_type(values, OLMO3_THETA, OLMO3_THETA)
    return OLMo3Config(
        **llama_from_hf(known),
        **types_from_hf(values),
        attention_bias=bool(values["attention_bias"]),
        rope_local_base_freq=known["rope_local_base_freq"],
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**llama_to_hf(spec), "attention_bias": first_mixer(spec).qkv_bias}


def _write_types(spec: DecoderSpec) -> dict[str, Any]:
    return {**_write(spec), **types_to_hf(spec), **ropes_to_hf(spec, OLMO3_THETA, OLMO3_THETA)}


_NAMES = {
    **LLAMA_NAMES,
    "attention_post_norm": Fused("post_attention_layernorm"),
    "mlp_post_norm": Fused("post_feedforward_layernorm"),
}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
_ONLY = {"hidden_act": ("silu",), "attention_dropout": (0, None)}
OLMO2 = Family(
    marker="is_olmo2_config",
    config=OLMo2Config,
    hf=HuggingFace(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        defaults=_DEFAULTS,
        only=_ONLY,
        read=_read,
        write=_write,
        names=_NAMES,
    ),
)
OLMO3 = Family(
    marker="is_olmo3_config",
    config=OLMo3Config,
    hf=HuggingFace(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        defaults={**_DEFAULTS, "sliding_window": 4096},
        only=_ONLY,
        read=_read_types,
        write=_write_types,
        names=_NAMES,
    ),
)
