"""Mixtral (Jiang et al., arXiv 2401.04088): experts in every layer, two for each token."""

from dataclasses import dataclass
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    expert_problems,
    loss_problems,
    only_experts,
    small_experts,
)
from kenotron_models.families.fields import (
    SharedFields,
    check,
    marker_problems,
    raise_all,
    window_problems,
    windowed,
)
from kenotron_models.families.hf_keys import experts_of, first_mixer, llama_from_hf, sparse_to_hf
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused, Stacked
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

EXPERTS = "block_sparse_moe.experts.{e}"


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RoutingFields, SharedFields):
    """Sizes and constants of a Mixtral decoder; ``intermediate_size`` is the width of an expert.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_mixtral_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    num_local_experts: int = 8
    """Experts of each layer."""
    num_experts_per_tok: int = 2
    """Experts that each token is sent to; their weights add up to 1."""
    router_aux_loss_coef: float = 0.001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    sliding_window_size: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = {
            "num_local_experts": self.num_local_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
        }
        raise_all(
            [
                *check(self),
                *window_problems(self.sliding_window_size),
                *expert_problems(sizes, *sizes),
                *loss_problems(router_aux_loss_coef=self.router_aux_loss_coef),
                *self.routing_problems(*sizes),
                *marker_problems(self, "is_mixtral_config"),
            ]
        )

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of experts and windows of a narrow copy."""
        experts, top_k = small_experts(self.num_local_experts, self.num_experts_per_tok, sizes.ep)
        return {
            "num_local_experts": experts,
            "num_experts_per_tok": top_k,
            "expert_capacity_factor": self.small_capacity(experts, top_k),
            "sliding_window_size": sizes.window(self.sliding_window_size),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        layers = self.num_hidden_layers
        router = RouterSpec(
            experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            normalize=True,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(router=router, features=self.intermediate_size)
        mixers = windowed(self.attention(), self.sliding_window_size, (), layers)
        return self.decoder_of(mixers, self.routed(experts, range(layers)))


def _read(values: Values) -> MixtralConfig:
    return MixtralConfig(
        **llama_from_hf(values),
        num_local_experts=values["num_local_experts"],
        num_experts_per_tok=values["num_experts_per_tok"],
        router_aux_loss_coef=values["router_aux_loss_coef"],
        router_jitter_noise=values.get("router_jitter_noise") or 0.0,
        sliding_window_size=values.get("sliding_window"),
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    experts = only_experts(spec, experts_of(spec))
    return {
        **sparse_to_hf(spec),
        "intermediate_size": experts.features,
        "num_local_experts": experts.router.experts,
        "num_experts_per_tok": experts.router.top_k,
        "router_aux_loss_coef": experts.router.balance_loss,
        "router_jitter_noise": experts.router.jitter,
        "sliding_window": first_mixer(spec).window,
    }


MIXTRAL = Family(
    marker="is_mixtral_config",
    config=MixtralConfig,
    hf=HuggingFace(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={
            "hidden_act": ("silu",),
            "attention_dropout": (0, None),
        },
        read=_read,
        write=_write,
        names={
            **LLAMA_NAMES,
            "experts_norm": Fused("post_attention_layernorm"),
            "experts.router": Fused("block_sparse_moe.gate"),
            "experts.gate_up": Stacked(f"{EXPERTS}.w1", f"{EXPERTS}.w3"),
            "experts.down": Stacked(f"{EXPERTS}.w2"),
        },
    ),
)
