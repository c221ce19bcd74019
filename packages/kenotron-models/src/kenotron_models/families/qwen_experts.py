"""The keys of experts that Qwen3-MoE and Qwen3-Next share, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kenotron_models.families.expert_fields import (
    expert_problems,
    loss_problems,
    small_experts,
    sparse_from_hf,
    sparse_layers,
)
from kenotron_models.families.fields import SharedFields
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.family import Values
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes


@dataclass(frozen=True, kw_only=True)
class QwenExpertFields(RoutingFields, SharedFields):
    """A decoder whose layers, all or some, have experts; a config inherits it."""

    num_experts: int = 128
    """Experts of a layer."""
    num_experts_per_tok: int = 8
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 768
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    norm_topk_prob: bool = True
    """True: the weights of a token's experts add up to 1."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers without experts, counted from 0."""
    decoder_sparse_step: int = 1
    """Every n-th layer has experts."""
    router_aux_loss_coef: float = 0.001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    def expert_field_problems(self, without: str) -> list[str]:
        """Name everything that is wrong with these keys.

        Args:
            without: the family of the same model without experts.
        """
        names = (
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
        )  # fmt: skip
        sizes = {name: getattr(self, name) for name in names}
        found = expert_problems(sizes, "num_experts", "num_experts_per_tok")
        found += loss_problems(router_aux_loss_coef=self.router_aux_loss_coef)
        found += self.routing_problems("num_experts", "num_experts_per_tok")
        if self.decoder_sparse_step >= 1 and not self.layers_with_experts:
            found.append(
                f"decoder_sparse_step: {self.decoder_sparse_step} was given, mlp_only_layers: "
                f"{list(self.mlp_only_layers)}; no layer has experts: choose others, or {without}"
            )
        return found

    @property
    def layers_with_experts(self) -> list[int]:
        """Layers with experts, counted from 0."""
        return sparse_layers(self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers)

    @property
    def router(self) -> RouterSpec:
        """How experts are chosen."""
        return RouterSpec(
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            normalize=self.norm_topk_prob,
            balance_loss=self.router_aux_loss_coef,
        )

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of experts of a narrow copy."""
        experts, top_k = small_experts(self.num_experts, self.num_experts_per_tok, sizes.ep)
        with_experts = self.layers_with_experts
        without = {*range(self.num_hidden_layers)} - {*with_experts}
        return {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "expert_capacity_factor": self.small_capacity(experts, top_k),
            "moe_intermediate_size": sizes.head_dim * 2,
            "mlp_only_layers": sizes.some_layers(without, self.num_hidden_layers),
            "decoder_sparse_step": 1,
        }


def expert_fields_from_hf(values: Values) -> dict[str, Any]:
    """Return the keys of experts. Raises ValueError, naming the key."""
    layers, found = values["num_hidden_layers"], sparse_from_hf(values)
    return {
        "num_experts": values.get("num_local_experts") or values["num_experts"],  # newer, older
        "num_experts_per_tok": values["num_experts_per_tok"],
        "moe_intermediate_size": values["moe_intermediate_size"],
        "norm_topk_prob": values["norm_topk_prob"],
        "mlp_only_layers": tuple(i for i in range(layers) if i not in found),
        "router_aux_loss_coef": values["router_aux_loss_coef"],
    }
