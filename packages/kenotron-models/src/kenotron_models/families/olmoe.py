"""OLMoE (Muennighoff et al., arXiv 2409.02060): experts in every layer, norms of all queries."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    QWEN_EXPERTS,
    expert_problems,
    loss_problems,
    only_experts,
    small_experts,
)
from kenotron_models.families.fields import SharedFields, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import experts_of, llama_from_hf, sparse_to_hf
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.norm import NormSpec
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class OLMoEConfig(RoutingFields, SharedFields):
    """Sizes and constants of an OLMoE decoder; ``intermediate_size`` is the width of an expert.

    Queries are normed over all heads together, and so are keys.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_olmoe_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    num_experts: int = 64
    """Experts of each layer."""
    num_experts_per_tok: int = 8
    """Experts that each token is sent to."""
    norm_topk_prob: bool = False
    """True: the weights of a token's experts add up to 1."""
    router_aux_loss_coef: float = 0.01
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
        }
        found = [*check(self), *expert_problems(sizes, *sizes)]
        found += loss_problems(router_aux_loss_coef=self.router_aux_loss_coef)
        found += self.routing_problems(*sizes)
        raise_all([*found, *marker_problems(self, "is_olmoe_config")])

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of experts of a narrow copy."""
        experts, top_k = small_experts(self.num_experts, self.num_experts_per_tok, sizes.ep)
        return {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "expert_capacity_factor": self.small_capacity(experts, top_k),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        norm, layers = NormSpec(eps=self.rms_norm_eps), self.num_hidden_layers
        mixer = replace(self.attention(), qk_norm=norm, qk_norm_over="width")
        router = RouterSpec(
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            normalize=self.norm_topk_prob,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(router=router, features=self.intermediate_size)
        return self.decoder_of([mixer] * layers, self.routed(experts, range(layers)))


_SAME = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")


def _read(values: Values) -> OLMoEConfig:
    return OLMoEConfig(**llama_from_hf(values), **{name: values[name] for name in _SAME})


def _write(spec: DecoderSpec) -> dict[str, Any]:
    experts, keys = only_experts(spec, experts_of(spec)), sparse_to_hf(spec)
    del keys["head_dim"]  # the family has hidden_size over num_attention_heads
    return {
        **keys,
        "intermediate_size": experts.features,
        "num_experts": experts.router.experts,
        "num_experts_per_tok": experts.router.top_k,
        "norm_topk_prob": experts.router.normalize,
        "router_aux_loss_coef": experts.router.balance_loss,
        "attention_bias": False,
        "clip_qkv": None,
    }


OLMOE = Family(
    marker="is_olmoe_config",
    config=OLMoEConfig,
    hf=HuggingFace(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
            "bos_token_id": None,
            "eos_token_id": 50279,
            "pad_token_id": 1,
        },
        only={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "attention_dropout": (0, None),
            "clip_qkv": (None,),
        },
        read=_read,
        write=_write,
        names=QWEN_EXPERTS,
    ),
)
