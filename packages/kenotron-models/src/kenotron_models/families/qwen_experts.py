"""The keys of experts that Qwen3-MoE and Qwen3-Next share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenotron_models.families.keys import key
from kenotron_models.families.rope_keys import LlamaKeys
from kenotron_models.families.routing_keys import (
    RoutingKeys,
    balance_key,
    experts_key,
    sparse_from_hf,
    sparse_layers,
    sparse_to_hf,
    top_k_key,
)
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class QwenExpertKeys(RoutingKeys, LlamaKeys):
    """A decoder whose layers, all or some, have experts."""

    num_experts: int = experts_key(128)
    """Experts of a layer."""
    num_experts_per_tok: int = top_k_key(8)
    """Experts that each token is sent to."""
    moe_intermediate_size: int = key(
        768, least=1, hf=True, at="experts.features", small=lambda sizes, _: 2 * sizes.head_dim
    )
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    norm_topk_prob: bool = key(True, hf=True, at="experts.router.normalize")
    """True: the weights of a token's experts add up to 1."""
    mlp_only_layers: tuple[int, ...] = key(())
    """Layers without experts, counted from 0."""
    decoder_sparse_step: int = key(1, least=1, hf=True)
    """Every n-th layer has experts."""
    router_aux_loss_coef: float = balance_key(0.001)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    def problems(self) -> list[str]:
        """Name layers of which none has experts."""
        found = super().problems()
        if not self.layers_with_experts:
            found.append(
                f"decoder_sparse_step: {self.decoder_sparse_step} was given, mlp_only_layers: "
                f"{list(self.mlp_only_layers)}; no layer has experts: choose others, or a dense "
                "family"
            )
        return found

    @property
    def layers_with_experts(self) -> list[int]:
        """Layers with experts, counted from 0."""
        return sparse_layers(self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers)

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the layers without experts of a narrow copy."""
        without = {*range(self.num_hidden_layers)} - {*self.layers_with_experts}
        return super().small_keys(sizes) | {
            "mlp_only_layers": sizes.some_layers(without, self.num_hidden_layers),
            "decoder_sparse_step": 1,
        }

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the number of experts, of newer and older files, and the layers without."""
        layers, found = range(values["num_hidden_layers"]), sparse_from_hf(values)
        return super().read_hf(values) | {
            "num_experts": values.get("num_local_experts") or values["num_experts"],
            "mlp_only_layers": tuple(i for i in layers if i not in found),
            "decoder_sparse_step": 1,
        }

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the layers with experts. Raises ValueError without any."""
        return super().write_hf(spec) | sparse_to_hf(spec)
