"""Nanotron's section of experts, within the config of a Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.keys import NOT_NEGATIVE, key
from kenotron_models.families.places import in_spec
from kenotron_models.families.routing_keys import (
    RoutingKeys,
    balance_key,
    experts_key,
    sparse_from_hf,
    sparse_to_hf,
    top_k_key,
)
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

ALL_LAYERS = (-1,)


@dataclass(frozen=True, kw_only=True)
class MoEConfig(RoutingKeys):
    """Experts of a feed-forward: each token is sent to a few of them."""

    num_experts: int = experts_key(8)
    """Experts of a layer."""
    top_k: int = top_k_key(2, hf="num_experts_per_tok")
    """Experts that each token is sent to."""
    moe_intermediate_size: int = key(
        1408, least=1, hf=True, at="experts.features", small=lambda sizes, _: 2 * sizes.head_dim
    )
    """Width of an expert, in features."""
    shared_expert_intermediate_size: int = key(
        5632, hf=True, at="experts.shared_features",
        small=lambda sizes, _: sizes.tp * sizes.head_dim,
    )  # fmt: skip
    """Width of the expert that all tokens are sent to, in features."""
    router_aux_loss_coef: float = balance_key(0.01)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens. Nanotron does not read it."""
    layers: tuple[int, ...] = key(ALL_LAYERS)
    """Layers that have experts, counted from 0; -1 alone: all; none: it is a dense model."""
    enable_shared_expert: bool = key(False, at="experts.shared_gate")
    """True: one expert sees every token; its result is multiplied by a sigmoid of the token."""
    token_dispatcher_type: Literal["alltoall", "allgather", "auto"] = key(
        "alltoall", at="experts.way"
    )
    """Method of sending tokens to their experts: once for each of them, or to all ranks of ep.
    auto: to all ranks where a token has more experts than ep has ranks, which sends fewer bytes.
    The numbers are the same, gradients of gathered tokens to rounding."""
    norm_topk_prob: bool = key(False, hf=True, at="experts.router.normalize")
    """True: the weights of a token's experts add up to 1."""
    router_z_loss_coef: float = key(0.0, rule=NOT_NEGATIVE, at="experts.router.z_loss")
    """Weight of the squared log of the sum of exponentials of a router's logits (ST-MoE)."""
    router_bias_rate: float = key(0.0, rule=NOT_NEGATIVE, at="experts.router.bias_rate")
    """Number that each update adds to the choice bias of an expert with too few tokens, and
    subtracts from one with too many (loss-free balancing); 0: there is no bias."""

    def problems(self) -> list[str]:
        """Name a shared expert without features."""
        found, width = super().problems(), self.shared_expert_intermediate_size
        if self.enable_shared_expert and width < 1:
            found.append(
                f"shared_expert_intermediate_size: {width} was given; it must be at least 1"
            )
        return found

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
        shared = self.shared_expert_intermediate_size * self.enable_shared_expert
        router = self.router(choice_bias=self.router_bias_rate > 0)
        return self.routed(chosen, router, shared_features=shared)

    def small_of(self, sizes: SmallSizes, layers: int) -> MoEConfig:
        """Return a narrow copy, for a small copy of a model of so many layers."""
        if self.layers == ALL_LAYERS:
            return self.small(sizes)
        return replace(self.small(sizes), layers=sizes.some_layers(self.layers, layers))

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layers with experts of a ``qwen2_moe``. Raises ValueError, naming the key."""
        found = sparse_from_hf(values)
        every = len(found) == values["num_hidden_layers"]
        layers = ALL_LAYERS if every else tuple(found)
        return super().read_hf(values) | {"layers": layers, "enable_shared_expert": True}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the layers with experts. Raises ValueError without a shared expert."""
        if not in_spec(spec, "experts.shared_gate"):
            raise ValueError(
                "enable_shared_expert: false was given; a qwen2_moe has a shared expert"
            )
        return super().write_hf(spec) | sparse_to_hf(spec)
