"""Experts chosen by biased sigmoid scores: keys, checks, and Hugging Face's names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    expert_problems,
    loss_problems,
    only_experts,
    small_experts,
)
from kenotron_models.families.fields import SharedFields, at_least
from kenotron_models.families.hf_keys import experts_of
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.family import Values
from kenotron_models.hf_tensors import Fused, Names, Stacked
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

SIGMOID_EXPERTS: Names = {
    "experts_norm": Fused("post_attention_layernorm"),
    "experts.router": Fused("mlp.gate", choice_bias="e_score_correction_bias"),
    "experts.gate_up": Stacked("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "experts.down": Stacked("mlp.experts.{e}.down_proj"),
    "experts.shared.gate_up": Fused("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "experts.shared.down": Fused("mlp.shared_experts.down_proj"),
}
"""Names of the experts of DeepSeek-V3 and GLM-4-MoE."""
_SAME = (
    "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",
    "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace",
)  # fmt: skip
_SIZES = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SigmoidExpertsFields(RoutingFields, SharedFields):
    """Keys of routed and shared experts, under DeepSeek-V3's names (arXiv 2412.19437)."""

    n_routed_experts: int = 256
    """Experts of a layer."""
    num_experts_per_tok: int = 8
    """Experts that each token is sent to."""
    n_shared_experts: int = 1
    """Experts that every token is sent to, as one of their total width."""
    moe_intermediate_size: int = 2048
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    n_group: int = 8
    """Groups of neighbouring experts."""
    topk_group: int = 4
    """Groups that the experts of a token are chosen from."""
    norm_topk_prob: bool = True
    """True: the weights of a token's experts add up to ``routed_scaling_factor``."""
    routed_scaling_factor: float = 2.5
    """What weights are multiplied with."""
    first_k_dense_replace: int = 3
    """Layers without experts, at the beginning."""
    router_aux_loss_coef: float = 0.0001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    router_bias_rate: float = 0.001
    """What each update adds to the choice bias of an expert with too few tokens, and takes from one
    with too many; 0: the bias stays."""

    def experts(self) -> dict[int, ExpertsSpec]:
        """Return the experts of the layers that have some, by layer from 0."""
        router = RouterSpec(
            experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            scoring="sigmoid",
            normalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            top_groups=self.topk_group,
            choice_bias=True,
            bias_rate=self.router_bias_rate,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(
            router=router,
            features=self.moe_intermediate_size,
            shared_features=self.n_shared_experts * self.moe_intermediate_size,
        )
        return self.routed(experts, range(self.first_k_dense_replace, self.num_hidden_layers))

    def small_routing(self, sizes: SmallSizes, width: int) -> dict[str, Any]:
        """Return these keys of a narrow copy whose experts have ``width`` features."""
        experts, top_k = small_experts(self.n_routed_experts, self.num_experts_per_tok, sizes.ep)
        groups = math.gcd(experts, min(self.n_group, 4))
        few = min(top_k, experts // groups)
        return {
            "n_routed_experts": experts,
            "num_experts_per_tok": few,
            "expert_capacity_factor": self.small_capacity(experts, few),
            "moe_intermediate_size": width,
            "n_shared_experts": sizes.tp if self.n_shared_experts else 0,
            "n_group": groups,
            "topk_group": min(self.topk_group, groups),
            "first_k_dense_replace": min(self.first_k_dense_replace, sizes.layers - 1),
        }


def sigmoid_problems(config: SigmoidExpertsFields) -> list[str]:
    """Name keys of experts that are out of range or do not fit one another."""
    sizes = {name: getattr(config, name) for name in _SIZES}
    found = expert_problems(sizes, "n_routed_experts", "num_experts_per_tok")
    found += loss_problems(
        router_aux_loss_coef=config.router_aux_loss_coef, router_bias_rate=config.router_bias_rate
    )
    found += config.routing_problems("n_routed_experts", "num_experts_per_tok")
    names = ("n_shared_experts", "first_k_dense_replace")
    found += at_least(0, {name: getattr(config, name) for name in names})
    if not 0 < config.routed_scaling_factor < float("inf"):
        found.append(
            f"routed_scaling_factor: {config.routed_scaling_factor} was given; it must be a finite "
            "number above 0"
        )
    if config.first_k_dense_replace >= config.num_hidden_layers:
        found.append(
            f"first_k_dense_replace: {config.first_k_dense_replace} was given; it must be below "
            f"num_hidden_layers ({config.num_hidden_layers}): some layer must have experts"
        )
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    return [*found, *group_problems(experts, top_k, config.n_group, config.topk_group)]


def group_problems(experts: int, top_k: int, groups: int, top: int) -> list[str]:
    """Name groups that do not divide the experts, or have too few for a token.

    Args:
        experts: n_routed_experts.
        top_k: num_experts_per_tok.
        groups: n_group.
        top: topk_group.
    """
    if groups < 1 or experts % groups:
        return [f"n_group: {groups} was given; it must divide n_routed_experts ({experts})"]
    found = []
    if top > groups:
        found.append(f"topk_group: {top} was given; it must not be above n_group ({groups})")
    if top_k > top * (experts // groups):
        found.append(
            f"num_experts_per_tok: {top_k} was given; topk_group ({top}) "
            f"groups have {top * (experts // groups)} experts"
        )
    return found


def routing_from_hf(values: Values) -> dict[str, Any]:
    """Return the keys of experts that a config.json has under the same names."""
    return {name: values[name] for name in _SAME}


def routing_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys that ``routing_from_hf`` reads. Raises ValueError for other experts."""
    found = experts_of(spec)
    experts = only_experts(spec, found)
    router = experts.router
    return {
        "n_routed_experts": router.experts,
        "num_experts_per_tok": router.top_k,
        "n_shared_experts": experts.shared_features // experts.features,
        "moe_intermediate_size": experts.features,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scale,
        "first_k_dense_replace": min(found),
    }
