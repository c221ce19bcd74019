"""GLM-4-MoE (GLM-4.5, arXiv 2508.06471): DeepSeek-V3's experts behind grouped-query attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenotron_models.families.keys import key, marker, with_default
from kenotron_models.families.places import in_spec
from kenotron_models.families.rope_keys import PartialRopeKeys
from kenotron_models.families.routing_keys import SigmoidRoutingKeys, experts_key
from kenotron_models.families.sigmoid_experts import SIGMOID_EXPERTS, SigmoidExpertsKeys
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_tensors import LLAMA_NAMES
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Glm4MoEConfig(SigmoidExpertsKeys, PartialRopeKeys):
    """Sizes and constants of a GLM-4-MoE decoder, under Hugging Face's names."""

    is_glm4_moe_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    attention_bias: bool = key(False, hf=True, at="attention.qkv_bias")
    partial_rotary_factor: float = with_default(PartialRopeKeys, "partial_rotary_factor", 0.5)
    use_qk_norm: bool = key(False, hf=True)
    """True: queries and keys are normed head by head."""
    n_routed_experts: int = experts_key(128)
    moe_intermediate_size: int = with_default(SigmoidRoutingKeys, "moe_intermediate_size", 1408)
    n_group: int = with_default(SigmoidRoutingKeys, "n_group", 1)
    topk_group: int = with_default(SigmoidRoutingKeys, "topk_group", 1)
    routed_scaling_factor: float = with_default(SigmoidRoutingKeys, "routed_scaling_factor", 1.0)
    first_k_dense_replace: int = with_default(SigmoidExpertsKeys, "first_k_dense_replace", 1)

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the width of an expert of a narrow copy."""
        return super().small_keys(sizes) | {"moe_intermediate_size": 2 * sizes.head_dim}

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        norm = NormSpec(eps=self.rms_norm_eps) if self.use_qk_norm else None
        mixers = [self.attention(qk_norm=norm)] * self.num_hidden_layers
        return self.decoder_of(mixers, self.experts())

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weight of the balance loss, of which a config.json says nothing."""
        return super().read_hf(values) | {"router_aux_loss_coef": 0.0}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the norm of queries; layers that predict further tokens are left out."""
        normed = in_spec(spec, "attention.qk_norm") is not None
        return super().write_hf(spec) | {"use_qk_norm": normed, "num_nextn_predict_layers": 0}


GLM4_MOE = Family(
    marker="is_glm4_moe_config",
    config=Glm4MoEConfig,
    hf=HuggingFace(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        names={**LLAMA_NAMES, **SIGMOID_EXPERTS},
        further_layers=True,
    ),
)
