"""Qwen3 with experts (arXiv 2505.09388), in all layers or in some."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import QWEN_EXPERTS
from kenotron_models.families.fields import check, marker_problems, raise_all
from kenotron_models.families.hf_keys import llama_from_hf, sparse_to_hf
from kenotron_models.families.moe_config import qwen_experts_to_hf
from kenotron_models.families.qwen_experts import QwenExpertFields, expert_fields_from_hf
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.norm import NormSpec
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(QwenExpertFields):
    """Sizes and constants of a Qwen3 decoder with experts.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_qwen3_moe_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = 128
    """Features of one head; None: hidden_size over num_attention_heads."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *self.expert_field_problems("qwen3")]
        raise_all([*found, *marker_problems(self, "is_qwen3_moe_config")])

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = replace(self.attention(), qk_norm=NormSpec(eps=self.rms_norm_eps))
        experts = ExpertsSpec(router=self.router, features=self.moe_intermediate_size)
        mixers = [mixer] * self.num_hidden_layers
        return self.decoder_of(mixers, self.routed(experts, self.layers_with_experts))


def _read(values: Values) -> Qwen3MoEConfig:
    return Qwen3MoEConfig(**llama_from_hf(values), **expert_fields_from_hf(values))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {
        **sparse_to_hf(spec), **qwen_experts_to_hf(spec), "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip


QWEN3_MOE = Family(
    marker="is_qwen3_moe_config",
    config=Qwen3MoEConfig,
    hf=HuggingFace(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "router_aux_loss_coef": 0.001,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        only={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "attention_dropout": (0, None),
            "use_sliding_window": (False, None),
        },
        read=_read,
        write=_write,
        names=QWEN_EXPERTS,
    ),
)
