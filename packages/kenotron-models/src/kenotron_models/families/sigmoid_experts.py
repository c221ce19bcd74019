"""Layers of routed and shared experts, as DeepSeek-V3 and GLM-4-MoE have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenotron_models.expert_layers import expert_layers
from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.decoder_keys import DecoderKeys
from kenotron_models.families.keys import key
from kenotron_models.families.routing_keys import SigmoidRoutingKeys, balance_key
from kenotron_models.hf_tensors import FusedModules, Names, Stacked
from kenotron_models.spec import DecoderSpec

SIGMOID_EXPERTS: Names = {
    "experts_norm": FusedModules("post_attention_layernorm"),
    "experts.router": FusedModules("mlp.gate", choice_bias="e_score_correction_bias"),
    "experts.gate_up": Stacked("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "experts.down": Stacked("mlp.experts.{e}.down_proj"),
    "experts.shared.gate_up": FusedModules(
        "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"
    ),
    "experts.shared.down": FusedModules("mlp.shared_experts.down_proj"),
}
"""Names of the experts of DeepSeek-V3 and GLM-4-MoE."""


@dataclass(frozen=True, kw_only=True)
class SigmoidExpertsKeys(SigmoidRoutingKeys, DecoderKeys):
    """A decoder whose layers, but for the first ones, have experts."""

    n_shared_experts: int = key(1, least=0, hf=True, small=lambda sizes, n: sizes.tp if n else 0)
    """Experts that every token is sent to, as one of their total width."""
    first_k_dense_replace: int = key(
        3, least=0, hf=True, small=lambda sizes, n: min(n, sizes.layers - 1)
    )
    """Layers without experts, at the beginning."""
    router_aux_loss_coef: float = balance_key(0.0001, hf=False)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    def problems(self) -> list[str]:
        """Name layers of which none has experts."""
        found, dense, layers = (
            super().problems(),
            self.first_k_dense_replace,
            self.num_hidden_layers,
        )
        if dense >= layers:
            found.append(
                f"first_k_dense_replace: {dense} was given; it must be below num_hidden_layers "
                f"({layers}): some layer must have experts"
            )
        return found

    def experts(self) -> dict[int, ExpertsSpec]:
        """Return the experts of the layers that have some, by layer from 0."""
        shared = self.n_shared_experts * self.moe_intermediate_size
        layers = range(self.first_k_dense_replace, self.num_hidden_layers)
        return self.routed(layers, shared_features=shared)

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weight of the balance loss, which a config.json seldom has."""
        loss = {"router_aux_loss_coef": values.get("aux_loss_alpha") or 0.0}
        return super().read_hf(values) | loss

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the shared experts and the layers without. Raises ValueError without experts."""
        found = expert_layers(spec)
        if not found:
            raise ValueError("Hugging Face's families of these keys have experts")
        first = min(found)
        shared = found[first].shared_features // found[first].features
        own = {"n_shared_experts": shared, "first_k_dense_replace": first}
        return super().write_hf(spec) | own
