"""Nanotron's section of experts, within the config of a Qwen2, and Hugging Face's keys for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    expert_problems,
    loss_problems,
    only_experts,
    small_experts,
    sparse_from_hf,
)
from kenotron_models.families.hf_keys import experts_of
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

ALL_LAYERS = (-1,)


@dataclass(frozen=True, kw_only=True)
class MoEConfig(RoutingFields):
    """Experts of a feed-forward: each token is sent to a few of them.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    num_experts: int = 8
    """Experts of a layer."""
    top_k: int = 2
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 1408
    """Width of an expert, in features."""
    shared_expert_intermediate_size: int = 5632
    """Width of the expert that all tokens are sent to, in features."""
    router_aux_loss_coef: float = 0.01
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens. Nanotron does not read it."""
    layers: tuple[int, ...] = ALL_LAYERS
    """Layers that have experts, counted from 0; -1 alone: all; none: it is a dense model."""
    enable_shared_expert: bool = False
    """True: one expert sees every token; its result is multiplied by a sigmoid of the token."""
    token_dispatcher_type: Literal["alltoall", "allgather", "auto"] = "alltoall"
    """How tokens travel to their experts: once for each of them, or to all ranks of ep. auto: to
    all ranks where a token has more experts than ep has ranks, which sends fewer bytes. The numbers
    are the same, gradients of gathered tokens to rounding."""
    norm_topk_prob: bool = False
    """True: the weights of a token's experts add up to 1."""
    router_z_loss_coef: float = 0.0
    """Weight of the squared log of the sum of exponentials of a router's logits (ST-MoE)."""
    router_bias_rate: float = 0.0
    """What each update adds to the choice bias of an expert with too few tokens, and takes from one
    with too many (loss-free balancing); 0: there is no bias."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ["num_experts", "top_k", "moe_intermediate_size"]
        names += ["shared_expert_intermediate_size"] * self.enable_shared_expert
        found = expert_problems({n: getattr(self, n) for n in names}, "num_experts", "top_k")
        weights = ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_rate")
        found += loss_problems(**{n: getattr(self, n) for n in weights}) + self.routing_problems(
            "num_experts", "top_k"
        )
        if found:
            raise ValueError("\n".join(found))

    def layer_problems(self, layers: int) -> list[str]:
        """Name layers that a model of so many does not have, each with its key."""
        if self.layers == ALL_LAYERS:
            return []
        once = len({*self.layers}) == len(self.layers)
        if once and all(0 <= i < layers for i in self.layers):
            return []
        return [
            f"moe_config.layers: {list(self.layers)} was given; it must be numbers from 0 to "
            f"{layers - 1}, each once, or [-1] for all layers"
        ]

    def feed_forwards(self, layers: int) -> dict[int, ExpertsSpec]:
        """Return the experts of a model of so many layers, by layer from 0."""
        chosen = range(layers) if self.layers == ALL_LAYERS else self.layers
        router = RouterSpec(
            experts=self.num_experts,
            top_k=self.top_k,
            normalize=self.norm_topk_prob,
            balance_loss=self.router_aux_loss_coef,
            z_loss=self.router_z_loss_coef,
            choice_bias=self.router_bias_rate > 0,
            bias_rate=self.router_bias_rate,
        )
        experts = ExpertsSpec(
            router=router,
            features=self.moe_intermediate_size,
            shared_features=self.shared_expert_intermediate_size * self.enable_shared_expert,
            shared_gate=self.enable_shared_expert,
            way=self.token_dispatcher_type,
        )
        return self.routed(experts, chosen)

    def small(self, sizes: SmallSizes, layers: int) -> MoEConfig:
        """Return a narrow copy, for a small copy of a model of so many layers."""
        experts, top_k = small_experts(self.num_experts, self.top_k, sizes.ep)
        every = self.layers == ALL_LAYERS
        return replace(
            self,
            num_experts=experts,
            top_k=top_k,
            moe_intermediate_size=2 * sizes.head_dim,
            expert_capacity_factor=self.small_capacity(experts, top_k),
            shared_expert_intermediate_size=sizes.tp * sizes.head_dim,
            layers=self.layers if every else sizes.some_layers(self.layers, layers),
        )


def experts_from_hf(values: Mapping[str, Any]) -> MoEConfig:
    """Return the experts of a ``qwen2_moe``. Raises ValueError, naming the key."""
    found = sparse_from_hf(values)
    return MoEConfig(
        num_experts=values["num_experts"],
        top_k=values["num_experts_per_tok"],
        moe_intermediate_size=values["moe_intermediate_size"],
        shared_expert_intermediate_size=values["shared_expert_intermediate_size"],
        router_aux_loss_coef=values["router_aux_loss_coef"],
        layers=ALL_LAYERS if len(found) == values["num_hidden_layers"] else tuple(found),
        enable_shared_expert=True,
        norm_topk_prob=values["norm_topk_prob"],
    )


def qwen_experts_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys that ``qwen2_moe`` and ``qwen3_moe`` share."""
    found = experts_of(spec)
    experts = only_experts(spec, found)
    return {
        "moe_intermediate_size": experts.features,
        "num_experts": experts.router.experts,
        "num_experts_per_tok": experts.router.top_k,
        "norm_topk_prob": experts.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(spec.num_hidden_layers) if i not in found],
        "router_aux_loss_coef": experts.router.balance_loss,
    }


def experts_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys that ``experts_from_hf`` reads. Raises ValueError without a shared expert."""
    experts = only_experts(spec, experts_of(spec))
    if not (experts.shared_features and experts.shared_gate):
        raise ValueError("enable_shared_expert: false was given; a qwen2_moe has a shared expert")
    shared = {"shared_expert_intermediate_size": experts.shared_features}
    return {**qwen_experts_to_hf(spec), **shared}
