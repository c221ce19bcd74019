"""The keys of Jamba (arXiv 2403.19887): Mamba with inner norms, some attention, experts."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    expert_problems,
    loss_problems,
    small_experts,
)
from kenotron_models.families.fields import at_least, check, marker_problems, raise_all
from kenotron_models.families.hybrid_layers import HybridFields
from kenotron_models.families.mamba_config import SMALL_STATE
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.hf_rope import FULL, LINEAR
from kenotron_models.mamba import MambaSpec
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

SIZES = (
    "num_experts", "num_experts_per_tok", "mamba_d_state", "mamba_d_conv", "mamba_expand",
)  # fmt: skip
PLACES = (
    "attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JambaConfig(RoutingFields, HybridFields):
    """Sizes and constants of a Jamba decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    words: ClassVar = {"M": LINEAR, "*": FULL}
    is_jamba_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    layers: str | None = None
    """A letter for each layer: M Mamba, * attention; | between the stages of a pipeline. None:
    layer_types."""
    layer_types: tuple[str, ...] | None = None
    """`linear_attention` (Mamba) or `full_attention` for each layer; None: layers says it, or
    attn_layer_period."""
    attn_layer_period: int = 8
    """Every n-th layer has attention where neither layers nor layer_types is given."""
    attn_layer_offset: int = 4
    """The first one that has, counted from 0."""
    expert_layer_period: int = 2
    """Every n-th layer has experts."""
    expert_layer_offset: int = 1
    """The first one that has, counted from 0."""
    num_experts: int = 16
    """Experts of a layer, each as wide as a feed-forward; 1: no layer has experts."""
    num_experts_per_tok: int = 2
    """Experts that each token is sent to."""
    router_aux_loss_coef: float = 0.001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    mamba_d_state: int = 16
    """Features of the state, for each channel."""
    mamba_d_conv: int = 4
    """Width of the convolution, in tokens."""
    mamba_expand: int = 2
    """Channels over width of the residual stream."""
    mamba_dt_rank: int | None = None
    """Rank of the step's projection; None: a sixteenth of the width, rounded up."""
    mamba_conv_bias: bool = True
    """True: the convolution has a bias."""
    mamba_proj_bias: bool = False
    """True: input and output projection of a Mamba have one."""
    rope_theta: float = 10000.0
    """No effect: there are no positions."""
    rope_interleaved: bool = False
    """No effect: there are no positions."""
    rope_scaling: RopeScaling | None = None
    """Only null: there are no positions to stretch."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = {name: getattr(self, name) for name in (*SIZES, *PLACES[::2])}
        if self.mamba_dt_rank is not None:
            sizes["mamba_dt_rank"] = self.mamba_dt_rank
        found = [*check(self), *at_least(1, sizes), *self.layer_problems()]
        for period, offset in zip(PLACES[::2], PLACES[1::2], strict=True):
            if not 0 <= getattr(self, offset) < max(getattr(self, period), 1):
                found.append(
                    f"{offset}: {getattr(self, offset)} was given; it must be from 0 to below "
                    f"{period} ({getattr(self, period)})"
                )
        if self.rope_scaling is not None:
            found.append(
                "rope_scaling: a mapping was given; a Jamba has no positions: leave it out"
            )
        if self.num_experts > 1:
            numbers = ("num_experts", "num_experts_per_tok")
            found += expert_problems({n: getattr(self, n) for n in numbers}, *numbers)
            found += self.routing_problems(*numbers)
        found += loss_problems(router_aux_loss_coef=self.router_aux_loss_coef)
        raise_all([*found, *marker_problems(self, "is_jamba_config")])

    def pattern(self) -> str:
        """Return the letters of all layers where the config does not say them."""
        period, offset = self.attn_layer_period, self.attn_layer_offset
        return "".join("*" if i % period == offset else "M" for i in range(self.num_hidden_layers))

    @property
    def layers_with_experts(self) -> list[int]:
        """Layers with experts, counted from 0."""
        period, offset = self.expert_layer_period, self.expert_layer_offset
        return [*range(offset, self.num_hidden_layers, period)] if self.num_experts > 1 else []

    @property
    def step_rank(self) -> int:
        """Rank of the step's projection, with None filled in."""
        return self.mamba_dt_rank or -(-self.hidden_size // 16)

    @property
    def cut_sizes(self) -> dict[str, int]:
        """What tp cuts, by its key."""
        found = {"num_attention_heads": self.num_attention_heads} if "*" in self.letters else {}
        if "M" in self.letters:
            found["mamba_expand * hidden_size"] = self.mamba_expand * self.hidden_size
        dense = len(self.layers_with_experts) < self.num_hidden_layers
        return found | ({"intermediate_size": self.intermediate_size} if dense else {})

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of layers and experts of a narrow copy."""
        experts, top_k = small_experts(self.num_experts, self.num_experts_per_tok, sizes.ep)
        period, offset = periodic(
            sizes.some_layers(self.layers_with_experts, self.num_hidden_layers), sizes.layers
        )
        return {
            **self.small_letters(sizes, "*"),
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "expert_capacity_factor": self.small_capacity(experts, top_k),
            "expert_layer_period": period,
            "expert_layer_offset": offset,
            "mamba_d_state": min(self.mamba_d_state, SMALL_STATE),
            "mamba_dt_rank": self.mamba_dt_rank and min(self.mamba_dt_rank, SMALL_STATE),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        documents = self.use_doc_masking
        attention = replace(self.attention(), rope=None, separate_documents=documents)
        router = RouterSpec(
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(router=router, features=self.intermediate_size)
        routed = self.routed(experts, self.layers_with_experts)
        spec = self.decoder_of([attention], {})
        mamba = MambaSpec(
            channels=self.mamba_expand * self.hidden_size,
            state=self.mamba_d_state,
            step_rank=self.step_rank,
            width=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            bias=self.mamba_proj_bias,
            inner_norm=spec.norm,
            separate_documents=documents,
        )
        mixers = self.by_letter({"M": mamba, "*": attention})
        return replace(self.decoder_of(mixers, routed), stage_starts=self.stage_starts)


def periodic(layers: Collection[int], depth: int) -> tuple[int, int]:
    """Return the least period with which some layers of so many come, and the first of them.

    Raises ValueError where they come with none.
    """
    found = sorted(layers)
    if not found:
        return depth + 1, depth
    first = found[0]
    period = max(first + 1, depth - first) if len(found) == 1 else found[1] - first
    if first >= period or found != [*range(first, depth, period)]:
        raise ValueError(
            f"layers {found}, counted from 0, are not every n-th one, as Hugging Face's jamba has "
            "its layers with attention or experts"
        )
    return period, first
