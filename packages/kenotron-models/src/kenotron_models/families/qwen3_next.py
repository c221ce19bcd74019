"""Qwen3-Next (Qwen, 2025): gated delta rules, every fourth layer gated attention, and experts."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.decoder_keys import HeadKeys
from kenotron_models.families.hybrid_layers import HybridKeys, layer_words
from kenotron_models.families.keys import key, marker, with_default
from kenotron_models.families.places import placed
from kenotron_models.families.qwen_experts import QwenExpertKeys
from kenotron_models.families.rope_keys import OutputBiasKeys, PartialRopeKeys
from kenotron_models.families.routing_keys import QWEN_EXPERTS, experts_key, top_k_key
from kenotron_models.family import Family, HuggingFace
from kenotron_models.gated_delta import GatedDeltaSpec
from kenotron_models.hf_rope import FULL, LINEAR
from kenotron_models.hf_tensors import FusedModules
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

_WORDS = {GatedDeltaSpec: LINEAR, AttentionSpec: FULL}


def _head_dim(sizes: SmallSizes, features: int) -> int:
    return min(features, sizes.head_dim)


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(OutputBiasKeys, HybridKeys, QwenExpertKeys, PartialRopeKeys):
    """Sizes and constants of a Qwen3-Next decoder, under Hugging Face's names."""

    words: ClassVar = {"L": LINEAR, "*": FULL}
    is_qwen3_next_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    layers: str | None = key(None)
    """A letter for each layer: L gated delta rule, * attention; | between the stages of a pipeline.
    None: layer_types."""
    layer_types: tuple[str, ...] | None = key(None, hf=True)
    """`linear_attention` or `full_attention` for each layer; None: layers says it, or
    full_attention_interval."""
    full_attention_interval: int = key(4, least=1, hf=True)
    """Every n-th layer has attention where neither layers nor layer_types is given."""
    head_dim: int | None = with_default(HeadKeys, "head_dim", 256)
    partial_rotary_factor: float = with_default(PartialRopeKeys, "partial_rotary_factor", 0.25)
    linear_num_key_heads: int = key(
        16, least=1, divides="linear_num_value_heads", hf=True, at="gated_delta.key_heads",
        small="heads",
    )  # fmt: skip
    """Key heads of a gated delta rule."""
    linear_num_value_heads: int = key(32, least=1, hf=True, at="gated_delta.value_heads")
    """Its value heads; a multiple of its key heads."""
    linear_key_head_dim: int = key(128, least=1, hf=True, at="gated_delta.key_dim", small=_head_dim)
    """Features of its keys."""
    linear_value_head_dim: int = key(
        128, least=1, hf=True, at="gated_delta.value_dim", small=_head_dim
    )
    """Features of its values."""
    linear_conv_kernel_dim: int = key(4, least=1, hf=True, at="gated_delta.width")
    """Width of its convolution, in tokens."""
    num_experts: int = experts_key(512)
    num_experts_per_tok: int = top_k_key(10)
    moe_intermediate_size: int = with_default(QwenExpertKeys, "moe_intermediate_size", 512)
    shared_expert_intermediate_size: int = key(
        512, least=1, hf=True, at="experts.shared_features",
        small=lambda sizes, _: sizes.tp * sizes.head_dim,
    )  # fmt: skip
    """Width of the expert that all tokens are sent to, in features; its result is multiplied by a
    sigmoid of the token."""

    def pattern(self) -> str:
        """Return the letters of all layers where the config does not say them."""
        every = self.full_attention_interval
        return "".join("L" if (i + 1) % every else "*" for i in range(self.num_hidden_layers))

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the value heads of a narrow copy, one or two for each key head."""
        each = min(self.linear_num_value_heads // self.linear_num_key_heads, 2)
        return super().small_keys(sizes) | {"linear_num_value_heads": sizes.heads * each}

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        norm = NormSpec(kind="offset_rms_norm", eps=self.rms_norm_eps)
        documents = self.use_doc_masking
        attention = self.attention(qk_norm=norm, gate=True, separate_documents=documents)
        delta = GatedDeltaSpec(**placed(self, "gated_delta"), eps=self.rms_norm_eps)
        mixers = self.by_letter({"L": delta, "*": attention})
        experts = self.routed(self.layers_with_experts, shared_gate=True)
        return replace(self.decoder_of(mixers, experts, norm), stage_starts=self.stage_starts)

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the type of each layer. Raises ValueError for other mixers."""
        return super().write_hf(spec) | {"layer_types": layer_words(spec, _WORDS)}


QWEN3_NEXT = Family(
    marker="is_qwen3_next_config",
    config=Qwen3NextConfig,
    hf=HuggingFace(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        names={
            **QWEN_EXPERTS,
            "gated_delta_norm": FusedModules("input_layernorm"),
            "gated_delta": FusedModules("linear_attn"),
            "gated_delta.in_proj": FusedModules(
                "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
            ),
            "gated_delta.conv": FusedModules("linear_attn.conv1d"),
            "gated_delta.norm": FusedModules("linear_attn.norm"),
            "gated_delta.out_proj": FusedModules("linear_attn.out_proj"),
        },
    ),
)
