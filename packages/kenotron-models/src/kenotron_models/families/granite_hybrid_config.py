"""The keys of Granite-4 (IBM, 2025): Mamba-2, some attention, experts, and four multipliers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import expert_problems, loss_problems, small_experts
from kenotron_models.families.fields import at_least, check, marker_problems, raise_all
from kenotron_models.families.hybrid_layers import HybridFields
from kenotron_models.families.layer_types import positive_problems
from kenotron_models.families.mamba_config import SMALL_STATE
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.hf_rope import FULL, LINEAR
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.mlp import MLPSpec
from kenotron_models.part import PartSpec
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

SIZES = (
    "shared_intermediate_size", "num_experts_per_tok", "mamba_n_heads", "mamba_n_groups",
    "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_chunk_size",
)  # fmt: skip
MULTIPLIERS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(RoutingFields, HybridFields):
    """Sizes and constants of a Granite-4 decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    words: ClassVar = {"M": LINEAR, "*": FULL}
    is_granite_hybrid_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    layers: str | None = None
    """A letter for each layer: M Mamba-2, * attention; | between the stages of a pipeline. None:
    layer_types."""
    layer_types: tuple[str, ...] | None = None
    """`linear_attention` (Mamba-2) or `full_attention` for each layer; None: layers says it, or
    all are Mamba-2."""
    attention_bias: bool = False
    """True: queries, keys, values and the output have a bias."""
    position_embedding_type: Literal["rope"] | None = None
    """rope: positions turn queries and keys; None: there are no positions."""
    embedding_multiplier: float = 1.0
    """What embedded tokens are multiplied with."""
    attention_multiplier: float = 1.0
    """What scores of attention are multiplied with."""
    residual_multiplier: float = 1.0
    """What a mixer or a feed-forward adds is multiplied with this."""
    logits_scaling: float = 1.0
    """What logits are divided by."""
    intermediate_size: int = 11008
    """Width of an expert, in features."""
    shared_intermediate_size: int = 1024
    """Width of the feed-forward that all tokens go through, next to experts if there are some."""
    num_local_experts: int = 8
    """Experts of each layer; 0: there are none."""
    num_experts_per_tok: int = 2
    """Experts that each token is sent to."""
    router_aux_loss_coef: float = 0.001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    mamba_n_heads: int = 128
    """Heads of a Mamba-2."""
    mamba_n_groups: int = 1
    """Groups of heads that share B and C."""
    mamba_d_state: int = 256
    """Features of its state, for each feature of a head."""
    mamba_d_conv: int = 4
    """Width of its convolution, in tokens."""
    mamba_expand: int = 2
    """Features of all its heads over width of the residual stream."""
    mamba_chunk_size: int = 256
    """Tokens that its scan computes as one; the numbers differ by rounding only."""
    mamba_conv_bias: bool = True
    """True: the convolution has a bias."""
    mamba_proj_bias: bool = False
    """True: its projections have biases."""
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    """Smallest and largest step at any time."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *at_least(1, {name: getattr(self, name) for name in SIZES})]
        found += positive_problems({name: getattr(self, name) for name in MULTIPLIERS})
        raise_all(
            [*(found or self._problems()), *marker_problems(self, "is_granite_hybrid_config")]
        )

    def _problems(self) -> list[str]:
        found, heads = self.layer_problems(), self.mamba_n_heads
        if (features := self.mamba_expand * self.hidden_size) % heads:
            found.append(
                f"mamba_n_heads: {heads} was given; it must divide mamba_expand * hidden_size "
                f"({features})"
            )
        if heads % self.mamba_n_groups:
            found.append(
                f"mamba_n_groups: {self.mamba_n_groups} was given; it must divide mamba_n_heads "
                f"({heads})"
            )
        if self.position_embedding_type not in (None, "rope"):
            found.append(
                f"position_embedding_type: {self.position_embedding_type!r} was given; it must be "
                "rope or null"
            )
        limits = self.time_step_limit
        if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
            found.append(
                f"time_step_limit: {list(limits)} was given; it must be two numbers from 0, the "
                "smaller one first"
            )
        found += at_least(0, {"num_local_experts": self.num_local_experts})
        if self.num_local_experts > 0:
            numbers = ("num_local_experts", "num_experts_per_tok")
            found += expert_problems({n: getattr(self, n) for n in numbers}, *numbers)
            found += self.routing_problems(*numbers)
        return found + loss_problems(router_aux_loss_coef=self.router_aux_loss_coef)

    def pattern(self) -> str:
        """Return the letters of all layers where the config does not say them."""
        return "M" * self.num_hidden_layers

    @property
    def cut_sizes(self) -> dict[str, int]:
        """What tp cuts, by its key."""
        names = {
            "num_attention_heads": "*" in self.letters,
            "mamba_n_heads": "M" in self.letters,
            "shared_intermediate_size": True,
        }
        return {name: getattr(self, name) for name, there in names.items() if there}

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of layers and experts of a narrow copy."""
        given, top_k = self.num_local_experts, self.num_experts_per_tok
        experts, few = small_experts(given, top_k, sizes.ep) if given else (0, top_k)
        return {
            **self.small_letters(sizes, "*"),
            "num_local_experts": experts,
            "num_experts_per_tok": few,
            "expert_capacity_factor": self.small_capacity(experts, few),
            "shared_intermediate_size": sizes.tp * sizes.head_dim,
            "mamba_n_heads": sizes.heads,
            "mamba_n_groups": sizes.kv_heads,
            "mamba_d_state": min(self.mamba_d_state, SMALL_STATE),
            "mamba_chunk_size": min(self.mamba_chunk_size, SMALL_STATE),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        documents, (low, high) = self.use_doc_masking, self.time_step_limit
        plain = self.attention()
        attention = replace(
            plain,
            rope=plain.rope if self.position_embedding_type == "rope" else None,
            scale=self.attention_multiplier,
            out_bias=self.attention_bias,
            separate_documents=documents,
        )
        mamba = Mamba2Spec(
            heads=self.mamba_n_heads,
            head_dim=self.mamba_expand * self.hidden_size // self.mamba_n_heads,
            groups=self.mamba_n_groups,
            state=self.mamba_d_state,
            width=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            bias=self.mamba_proj_bias,
            separate_documents=documents,
            step_limits=(low, high),
            eps=self.rms_norm_eps,
            chunk=self.mamba_chunk_size,
        )
        mixers = self.by_letter({"M": mamba, "*": attention})
        spec = self.decoder_of(mixers, self._feed_forwards())
        scale = self.residual_multiplier
        return replace(
            spec,
            blocks=tuple(replace(block, residual_scale=scale) for block in spec.blocks),
            stage_starts=self.stage_starts,
            embedding_scale=None if self.embedding_multiplier == 1 else self.embedding_multiplier,
            logit_scale=1 / self.logits_scaling,
        )

    def _feed_forwards(self) -> dict[int, PartSpec]:
        """The feed-forward of each layer."""
        layers, shared = range(self.num_hidden_layers), self.shared_intermediate_size
        if not self.num_local_experts:
            return dict.fromkeys(layers, MLPSpec(features=shared))
        router = RouterSpec(
            experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            normalize=True,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(
            router=router, features=self.intermediate_size, shared_features=shared
        )
        return {**self.routed(experts, layers)}
