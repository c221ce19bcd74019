"""Qwen3 with experts (arXiv 2505.09388), in all layers or in some."""

from dataclasses import dataclass
from typing import Any

from kenotron_models.families.decoder_keys import HeadKeys
from kenotron_models.families.keys import marker, with_default
from kenotron_models.families.qwen_experts import QwenExpertKeys
from kenotron_models.families.routing_keys import QWEN_EXPERTS
from kenotron_models.family import Family, HuggingFace
from kenotron_models.norm import NormSpec
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(QwenExpertKeys):
    """Sizes and constants of a Qwen3 decoder with experts."""

    is_qwen3_moe_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = with_default(HeadKeys, "head_dim", 128)

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mixer = self.attention(qk_norm=NormSpec(eps=self.rms_norm_eps))
        mixers = [mixer] * self.num_hidden_layers
        return self.decoder_of(mixers, self.routed(self.layers_with_experts))

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the keys of biases and windows, of which there are none."""
        none = {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
        return super().write_hf(spec) | none


QWEN3_MOE = Family(
    marker="is_qwen3_moe_config",
    config=Qwen3MoEConfig,
    hf=HuggingFace(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "head_dim": None,
            "norm_topk_prob": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        only={"attention_bias": (False, None), "use_sliding_window": (False, None)},
        names=QWEN_EXPERTS,
    ),
)
