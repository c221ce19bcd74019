"""LlaMoE, Nanotron's example of experts: a Llama whose feed-forwards are ungated experts (GELU)."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import expert_problems, small_experts
from kenotron_models.families.fields import SharedFields, check, marker_problems, raise_all
from kenotron_models.family import Family
from kenotron_models.rope import Rope
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

THETA = 10000.0
"""Base of its wave lengths."""


@dataclass(frozen=True, kw_only=True)
class LlaMoEConfig(SharedFields):
    """A Llama whose feed-forwards are experts, under the names of Nanotron's example.

    As there, rotary positions turn neighbouring features with base 10,000, experts have two
    matrices and a GELU, and weights are not renormalised. Unlike there, ``tie_word_embeddings`` and
    ``rope_scaling`` mean what they say, and ``hidden_act`` must have its default.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_llamoe_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    moe_num_experts: int = 1
    """Experts of a layer."""
    num_experts_per_tok: int = 1
    """Experts that each token is sent to."""
    moe_capacity_factor: int = 1
    """No effect, as in Nanotron: no token is dropped. Only 1 is accepted."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = {
            "moe_num_experts": self.moe_num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
        }
        found = [*check(self), *expert_problems(sizes, *sizes)]
        if self.moe_capacity_factor != 1:
            found.append(
                f"moe_capacity_factor: {self.moe_capacity_factor} was given; no token is dropped, "
                "so it must be 1, or be left out"
            )
        if self.rope_theta != THETA:
            found.append(
                f"rope_theta: {self.rope_theta} was given; the base of this family is {THETA:g}"
            )
        raise_all([*found, *marker_problems(self, "is_llamoe_config")])

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of experts of a narrow copy."""
        experts, top_k = small_experts(self.moe_num_experts, self.num_experts_per_tok, sizes.ep)
        return {"moe_num_experts": experts, "num_experts_per_tok": top_k}

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        router = RouterSpec(experts=self.moe_num_experts, top_k=self.num_experts_per_tok)
        experts = ExpertsSpec(
            router=router, features=self.intermediate_size, gated=False, activation="gelu_tanh"
        )
        mixer = replace(self.attention(), rope=Rope(interleaved=True, scaling=self.rope_scaling))
        layers = self.num_hidden_layers
        return self.decoder_of([mixer] * layers, dict.fromkeys(range(layers), experts))


LLAMOE = Family(marker="is_llamoe_config", config=LlaMoEConfig)
