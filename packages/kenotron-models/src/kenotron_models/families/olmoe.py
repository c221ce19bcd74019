"""OLMoE (Muennighoff et al., arXiv 2409.02060): experts in every layer, norms of all queries."""

from dataclasses import dataclass
from typing import Any

from kenotron_models.families.decoder_keys import EVEN
from kenotron_models.families.keys import key, marker
from kenotron_models.families.rope_keys import LlamaKeys
from kenotron_models.families.routing_keys import (
    QWEN_EXPERTS,
    RoutingKeys,
    balance_key,
    experts_key,
    top_k_key,
)
from kenotron_models.family import Family, HuggingFace
from kenotron_models.norm import NormSpec
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class OLMoEConfig(RoutingKeys, LlamaKeys):
    """Sizes and constants of an OLMoE decoder; ``intermediate_size`` is the width of an expert.

    Queries are normed over all heads together, and so are keys.
    """

    is_olmoe_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = key(None, rule=EVEN)
    num_experts: int = experts_key(64)
    """Experts of each layer."""
    num_experts_per_tok: int = top_k_key(8)
    """Experts that each token is sent to."""
    norm_topk_prob: bool = key(False, hf=True, at="experts.router.normalize")
    """True: the weights of a token's experts add up to 1."""
    router_aux_loss_coef: float = balance_key(0.01)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        layers = self.num_hidden_layers
        mixer = self.attention(qk_norm=NormSpec(eps=self.rms_norm_eps), qk_norm_over="width")
        return self.decoder_of([mixer] * layers, self.routed(range(layers)))

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the keys of biases and clipped queries, of which there are none."""
        return super().write_hf(spec) | {"attention_bias": False, "clip_qkv": None}


OLMOE = Family(
    marker="is_olmoe_config",
    config=OLMoEConfig,
    hf=HuggingFace(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": 50279,
            "pad_token_id": 1,
        },
        only={"attention_bias": (False, None), "clip_qkv": (None,)},
        names=QWEN_EXPERTS,
    ),
)
