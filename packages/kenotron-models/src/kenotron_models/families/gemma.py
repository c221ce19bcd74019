"""Gemma-2 (arXiv 2408.00118) and the text model of Gemma-3 (arXiv 2503.19786)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.decoder_keys import DecoderKeys, HeadKeys
from kenotron_models.families.keys import OF_CONFIG, POSITIVE, key, marker, one_of, with_default
from kenotron_models.families.places import in_spec
from kenotron_models.families.rope_keys import OutputBiasKeys
from kenotron_models.families.window_keys import LayerTypeKeys, ropes_to_hf
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_rope import ropes_by_type
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules
from kenotron_models.mlp import MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

GELU = "gelu_pytorch_tanh"
GLOBAL, LOCAL = 1000000.0, 10000.0
"""Bases of the rotary wave lengths of a Gemma-3 where a config.json says none."""


def _scalar(scale: float | None) -> float | None:
    """Return query_pre_attn_scalar, a whole number where one has this scale, as there."""
    if scale is None:
        return None
    scalar = scale**-2
    whole = round(scalar)
    return whole if whole and whole**-0.5 == scale else scalar


@dataclass(frozen=True, kw_only=True)
class GemmaKeys(OutputBiasKeys, LayerTypeKeys):
    """Keys of Gemma-2 and Gemma-3, under Hugging Face's names but for hidden_act."""

    hidden_act: str = key(
        GELU, hf="hidden_activation", at=OF_CONFIG, rule=one_of(GELU), only=(GELU,)
    )
    """Activation of the gated feed-forward, hidden_activation of Hugging Face; only
    `gelu_pytorch_tanh` is known."""
    head_dim: int | None = with_default(HeadKeys, "head_dim", 256)
    query_pre_attn_scalar: float = key(
        256, rule=POSITIVE, hf=True, at="attention.scale", write=_scalar
    )
    """Scores are divided by its root."""
    final_logit_softcapping: float | None = key(None, rule=POSITIVE, hf=True, at="logit_cap")
    """Logits l become this times tanh(l / this); None: they stay."""
    tie_word_embeddings: bool = with_default(DecoderKeys, "tie_word_embeddings", True)

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the scale of scores of a narrow copy."""
        share = min(sizes.head_dim, self.features_of_head) / self.features_of_head
        scalar = {"query_pre_attn_scalar": self.query_pre_attn_scalar * share}
        return super().small_keys(sizes) | scalar

    def mixer(self, **changes: Any) -> AttentionSpec:
        """Return what these keys say of attention in layers without a window."""
        return self.attention(scale=self.query_pre_attn_scalar**-0.5, **changes)

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

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Check the parts that no key names. Raises ValueError for other ones."""
        if in_spec(spec, "attention.scale") is None:
            raise ValueError("a Gemma has query_pre_attn_scalar, and scores a scale of their own")
        return super().write_hf(spec)


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaKeys):
    """Sizes and constants of a Gemma-2 decoder."""

    is_gemma2_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    final_logit_softcapping: float | None = with_default(GemmaKeys, "final_logit_softcapping", 30.0)
    attn_logit_softcapping: float | None = key(50.0, rule=POSITIVE, hf=True, at="attention.cap")
    """Scores s become this times tanh(s / this); None: they stay."""

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mixer = self.mixer(cap=self.attn_logit_softcapping)
        return self.normed_twice(self.by_type(mixer))


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaKeys):
    """Sizes and constants of the text model of a Gemma-3.

    Queries and keys are normed head by head; layers with a window have a rotary base of their own.
    """

    is_gemma3_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    rope_theta: float = key(GLOBAL, rule=POSITIVE)
    """Base of the rotary wave lengths of full layers; rope_scaling stretches theirs only."""
    rope_local_base_freq: float = key(LOCAL, rule=POSITIVE)
    """The base in sliding layers."""
    sliding_window_pattern: int = key(6, least=1, hf=True)
    """Every n-th layer is full where layer_types is null."""

    def pattern(self) -> tuple[str, ...]:
        """Return the types of all layers where the config does not say them."""
        return self.every_nth_full(self.sliding_window_pattern)

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        norm = NormSpec(kind="offset_rms_norm", eps=self.rms_norm_eps)
        mixer = self.mixer(qk_norm=norm)
        assert mixer.rope is not None  # all layers have positions
        rope = replace(mixer.rope, theta=self.rope_local_base_freq, scaling=None)
        return self.normed_twice(self.by_type(mixer, replace(mixer, rope=rope)))

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the positions of each type of layers."""
        known = ropes_by_type(values, GLOBAL, LOCAL)
        local = {"rope_local_base_freq": known["rope_local_base_freq"]}
        return super().read_hf(known) | local

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the positions of each type of layers; the cap of scores is Gemma-2's."""
        own = {
            "sliding_window_pattern": 6,
            "attn_logit_softcapping": in_spec(spec, "attention.cap"),
        }
        return super().write_hf(spec) | ropes_to_hf(spec, GLOBAL, LOCAL) | own


_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ONLY = {"use_bidirectional_attention": (False, None)}
_NAMES = {
    **LLAMA_NAMES,
    "attention_post_norm": FusedModules("post_attention_layernorm"),
    "mlp_norm": FusedModules("pre_feedforward_layernorm"),
    "mlp_post_norm": FusedModules("post_feedforward_layernorm"),
}
GEMMA2 = Family(
    marker="is_gemma2_config",
    config=Gemma2Config,
    hf=HuggingFace(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults={**_DEFAULTS, "max_position_embeddings": 8192},
        only=_ONLY,
        names=_NAMES,
    ),
)
GEMMA3 = Family(
    marker="is_gemma3_config",
    config=Gemma3Config,
    hf=HuggingFace(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults={**_DEFAULTS, "max_position_embeddings": 131072},
        only={**_ONLY, "attn_logit_softcapping": (None,)},
        names=_NAMES,
    ),
)
