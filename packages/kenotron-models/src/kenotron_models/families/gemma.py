"""Gemma-2 (arXiv 2408.00118) and the text model of Gemma-3 (arXiv 2503.19786)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.fields import check, marker_problems, raise_all
from kenotron_models.families.hf_keys import first_mixer, first_mlp, llama_from_hf, sparse_to_hf
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
from kenotron_models.mlp import MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

GELU = "gelu_pytorch_tanh"
GLOBAL, LOCAL = 1000000.0, 10000.0
"""Bases of the rotary wave lengths of a Gemma-3 where a config.json says none."""


@dataclass(frozen=True, kw_only=True)
class GemmaFields(LayerTypeFields):
    """What Gemma-2 and Gemma-3 share, under Hugging Face's names but for hidden_act."""

    activation: ClassVar[str] = GELU
    hidden_act: str = GELU
    """Activation of the gated feed-forward, hidden_activation of Hugging Face; only
    `gelu_pytorch_tanh` is known."""
    head_dim: int | None = 256
    """Features of one head; None: hidden_size over num_attention_heads."""
    attention_bias: bool = False
    """True: queries, keys, values and the output have a bias."""
    query_pre_attn_scalar: float = 256
    """Scores are divided by its root."""
    final_logit_softcapping: float | None = None
    """Logits l become this times tanh(l / this); None: they stay."""
    tie_word_embeddings: bool = True
    """True: the head is the embedding's own matrix."""

    def problems(self) -> list[str]:
        """Name everything that is wrong with the keys that both families have."""
        names = ("query_pre_attn_scalar", "final_logit_softcapping")
        found = positive_problems({name: getattr(self, name) for name in names})
        return [*check(self), *self.type_problems(), *found]

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of windows and scores of a narrow copy."""
        share = min(sizes.head_dim, self.features_of_head) / self.features_of_head
        scalar = {"query_pre_attn_scalar": self.query_pre_attn_scalar * share}
        return LayerTypeFields.small_layers(self, sizes) | scalar

    def mixer(self) -> AttentionSpec:
        """Return what these keys say of attention in layers without a window."""
        scale = self.query_pre_attn_scalar**-0.5
        return replace(self.attention(), scale=scale, out_bias=self.attention_bias)

    def normed_twice(self, mixers: Sequence[AttentionSpec]) -> DecoderSpec:
        """Return the decoder of these mixers, with norms before and after each part."""
        mlp = MLPSpec(features=self.intermediate_size, activation="gelu_tanh")
        norm = NormSpec(kind="offset_rms_norm", eps=self.rms_norm_eps)
        spec = self.decoder_of(mixers, dict.fromkeys(range(len(mixers)), mlp), norm)
        blocks = (replace(block, norms="both") for block in spec.blocks)
        return replace(
            spec,
            blocks=tuple(blocks),
            embedding_scale=self.hidden_size**0.5,
            logit_cap=self.final_logit_softcapping,
        )


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaFields):
    """Sizes and constants of a Gemma-2 decoder.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_gemma2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    final_logit_softcapping: float | None = 30.0
    """Logits l become this times tanh(l / this); None: they stay."""
    attn_logit_softcapping: float | None = 50.0
    """Scores s become this times tanh(s / this); None: they stay."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        cap = {"attn_logit_softcapping": self.attn_logit_softcapping}
        found = [*self.problems(), *positive_problems(cap)]
        raise_all([*found, *marker_problems(self, "is_gemma2_config")])

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = replace(self.mixer(), cap=self.attn_logit_softcapping)
        return self.normed_twice(self.by_type(mixer))


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaFields):
    """Sizes and constants of the text model of a Gemma-3.

    Queries and keys are normed head by head; layers with a window have a rotary base of their own.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_gemma3_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    rope_theta: float = GLOBAL
    """Base of the rotary wave lengths of full layers; rope_scaling stretches theirs only."""
    rope_local_base_freq: float = LOCAL
    """The base in sliding layers."""
    sliding_window_pattern: int = 6
    """Every n-th layer is full where layer_types is null."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ("rope_local_base_freq", "sliding_window_pattern")
        found = positive_problems({name: getattr(self, name) for name in names})
        found = [*self.problems(), *found, *marker_problems(self, "is_gemma3_config")]
        raise_all(found)

    def pattern(self) -> tuple[str, ...]:
        """Return the types of all layers where the config does not say them."""
        return self.every_nth_full(self.sliding_window_pattern)

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        norm = NormSpec(kind="offset_rms_norm", eps=self.rms_norm_eps)
        mixer = replace(self.mixer(), qk_norm=norm)
        assert mixer.rope is not None  # all layers have positions
        rope = replace(mixer.rope, theta=self.rope_local_base_freq, scaling=None)
        return self.normed_twice(self.by_type(mixer, replace(mixer, rope=rope)))


def _shared(values: Values, ropes: Values) -> dict[str, Any]:
    return {
        **llama_from_hf(ropes),
        **types_from_hf(values),
        "attention_bias": bool(values["attention_bias"]),
        "query_pre_attn_scalar": values["query_pre_attn_scalar"],
        "final_logit_softcapping": values["final_logit_softcapping"],
    }


def _read2(values: Values) -> Gemma2Config:
    return Gemma2Config(
        **_shared(values, values), attn_logit_softcapping=values["attn_logit_softcapping"]
    )


def _read3(values: Values) -> Gemma3Config:
    known = ropes_by_type(values, GLOBAL, LOCAL)
    return Gemma3Config(
        **_shared(values, known),
        rope_local_base_freq=known["rope_local_base_freq"],
        sliding_window_pattern=values["sliding_window_pattern"],
    )


def _write2(spec: DecoderSpec) -> dict[str, Any]:
    mixer, keys = first_mixer(spec), sparse_to_hf(spec)
    if mixer.scale is None or first_mlp(spec).activation != "gelu_tanh":
        raise ValueError("a Gemma has query_pre_attn_scalar and the activation gelu_pytorch_tanh")
    del keys["hidden_act"]
    scalar = mixer.scale**-2
    whole = round(scalar)  # config.json has whole numbers only
    return {
        **keys,
        **types_to_hf(spec),
        "hidden_activation": GELU,
        "attention_bias": mixer.qkv_bias,
        "query_pre_attn_scalar": whole if whole and whole**-0.5 == mixer.scale else scalar,
        "final_logit_softcapping": spec.logit_cap,
        "attn_logit_softcapping": mixer.cap,
    }


def _write3(spec: DecoderSpec) -> dict[str, Any]:
    return {**_write2(spec), **ropes_to_hf(spec, GLOBAL, LOCAL), "sliding_window_pattern": 6}


_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": GELU,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ONLY = {
    "hidden_activation": (GELU,),
    "attention_dropout": (0, None),
    "use_bidirectional_attention": (False, None),
}
_NAMES = {
    **LLAMA_NAMES,
    "attention_post_norm": Fused("post_attention_layernorm"),
    "mlp_norm": Fused("pre_feedforward_layernorm"),
    "mlp_post_norm": Fused("post_feedforward_layernorm"),
}
GEMMA2 = Family(
    marker="is_gemma2_config",
    config=Gemma2Config,
    hf=HuggingFace(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults={
            **_DEFAULTS,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        only=_ONLY,
        read=_read2,
        write=_write2,
        names=_NAMES,
    ),
)
GEMMA3 = Family(
    marker="is_gemma3_config",
    config=Gemma3Config,
    hf=HuggingFace(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults={
            **_DEFAULTS,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        only={**_ONLY, "attn_logit_softcapping": (None,)},
        read=_read3,
        write=_write3,
        names=_NAMES,
    ),
)
