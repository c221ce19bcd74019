"""Jamba (arXiv 2403.19887): Mamba with inner norms, some attention, experts."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kenotron_models.attention import AttentionSpec
from kenotron_models.expert_layers import expert_layers
from kenotron_models.families.decoder_keys import EVEN, HeadKeys
from kenotron_models.families.hybrid_layers import HybridKeys, layer_words
from kenotron_models.families.keys import key, marker
from kenotron_models.families.places import MISSING, in_spec, placed
from kenotron_models.families.routing_keys import RoutingKeys, balance_key, experts_key, top_k_key
from kenotron_models.families.state_space_keys import few, state_space_names
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_rope import FULL, LINEAR
from kenotron_models.hf_tensors import FusedModules, Names, Outside, Stacked
from kenotron_models.mamba import MambaSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

_WORDS = {MambaSpec: LINEAR, AttentionSpec: FULL}
PLACES = (
    "attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JambaConfig(RoutingKeys, HybridKeys, HeadKeys):
    """Sizes and constants of a Jamba decoder, under Hugging Face's names. It has no positions."""

    words: ClassVar = {"M": LINEAR, "*": FULL}
    products: ClassVar = {"mamba.channels": "mamba_expand * hidden_size"}
    former: ClassVar = (*HeadKeys.former, "rope_theta", "rope_interleaved", "rope_scaling")
    is_jamba_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    layers: str | None = key(None)
    """A letter for each layer: M Mamba, * attention; | between the stages of a pipeline. None:
    layer_types."""
    layer_types: tuple[str, ...] | None = key(None)
    """`linear_attention` (Mamba) or `full_attention` for each layer; None: layers says it, or
    attn_layer_period."""
    head_dim: int | None = key(None, rule=EVEN)
    attn_layer_period: int = key(8, least=1, hf=True)
    """Every n-th layer has attention where neither layers nor layer_types is given."""
    attn_layer_offset: int = key(4, least=0, hf=True)
    """The first one that has, counted from 0."""
    expert_layer_period: int = key(2, least=1, hf=True)
    """Every n-th layer has experts."""
    expert_layer_offset: int = key(1, least=0, hf=True)
    """The first one that has, counted from 0."""
    num_experts: int = experts_key(16)
    """Experts of a layer, each as wide as a feed-forward; 1: no layer has experts."""
    num_experts_per_tok: int = top_k_key(2)
    """Experts that each token is sent to."""
    router_aux_loss_coef: float = balance_key(0.001)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    mamba_d_state: int = key(16, least=1, hf=True, at="mamba.state", small=few)
    """Features of the state, for each channel."""
    mamba_d_conv: int = key(4, least=1, hf=True, at="mamba.width")
    """Width of the convolution, in tokens."""
    mamba_expand: int = key(2, least=1, hf=True)
    """Channels over width of the residual stream."""
    mamba_dt_rank: int | None = key(
        None, least=1, hf=True, at="mamba.step_rank", small=few,
        read=lambda rank: None if rank == "auto" else rank,
    )  # fmt: skip
    """Rank of the step's projection; None: a sixteenth of the width, rounded up."""
    mamba_conv_bias: bool = key(True, hf=True, at="mamba.conv_bias")
    """True: the convolution has a bias."""
    mamba_proj_bias: bool = key(False, hf=True, at="mamba.bias")
    """True: input and output projection of a Mamba have one."""

    def problems(self) -> list[str]:
        """Name first layers that are beyond their period."""
        return super().problems() + [
            f"{offset}: {getattr(self, offset)} was given; it must be from 0 to below "
            f"{period} ({getattr(self, period)})"
            for period, offset in (PLACES[:2], PLACES[2:])
            if getattr(self, offset) >= getattr(self, period)
        ]

    def pattern(self) -> str:
        """Return the letters of all layers where the config does not say them."""
        period, offset = self.attn_layer_period, self.attn_layer_offset
        return "".join("*" if i % period == offset else "M" for i in range(self.num_hidden_layers))

    @property
    def has_experts(self) -> bool:
        """True where a layer may have experts."""
        return self.num_experts > 1

    @property
    def layers_with_experts(self) -> list[int]:
        """Layers with experts, counted from 0."""
        period, offset = self.expert_layer_period, self.expert_layer_offset
        return [*range(offset, self.num_hidden_layers, period)] if self.has_experts else []

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the layers with experts of a narrow copy."""
        kept = sizes.some_layers(self.layers_with_experts, self.num_hidden_layers)
        if len(kept) > 1 and kept != tuple(range(kept[0], sizes.layers, kept[1] - kept[0])):
            kept = tuple(range(1, sizes.layers, 2))  # some have experts, and not all
        return super().small_keys(sizes) | dict(
            zip(PLACES[2:], periodic(kept, sizes.layers), strict=True)
        )

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        attention = self.attention(separate_documents=self.use_doc_masking)
        own: dict[str, Any] = {"step_rank": self.mamba_dt_rank or -(-self.hidden_size // 16)}
        mamba = MambaSpec(
            **placed(self, "mamba") | own,
            channels=self.mamba_expand * self.hidden_size,
            inner_norm=self.decoder_of([attention]).norm,
        )
        mixers = self.by_letter({"M": mamba, "*": attention})
        spec = self.decoder_of(mixers, self.routed(self.layers_with_experts))
        return replace(spec, stage_starts=self.stage_starts)

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the periods of layers. Raises ValueError for other mixers, or without periods."""
        words, routed = layer_words(spec, _WORDS), expert_layers(spec)
        attention = [i for i, word in enumerate(words) if word == FULL]
        places = (*periodic(attention, len(words)), *periodic(routed, len(words)))
        own = dict(zip(PLACES, places, strict=True)) | ({} if routed else {"num_experts": 1})
        if (channels := in_spec(spec, "mamba.channels")) is not MISSING:
            own["mamba_expand"] = channels // spec.hidden_size
        return super().write_hf(spec) | own


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


_NAMES: Names = {
    "attention_norm": FusedModules("input_layernorm"),
    "attention.qkv": FusedModules("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": FusedModules("self_attn.o_proj"),
    **state_space_names(
        "mamba",
        "mamba",
        "input_layernorm",
        x_proj="x_proj",
        dt_proj="dt_proj",
        dt_norm="dt_layernorm",
        b_norm="b_layernorm",
        c_norm="c_layernorm",
    ),  # fmt: skip
    "mlp_norm": FusedModules("pre_ff_layernorm"),
    "mlp.gate_up": FusedModules("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": FusedModules("feed_forward.down_proj"),
    "experts_norm": FusedModules("pre_ff_layernorm"),
    "experts.router": FusedModules("feed_forward.router"),
    "experts.gate_up": Stacked(
        "feed_forward.experts.{e}.gate_proj", "feed_forward.experts.{e}.up_proj"
    ),
    "experts.down": Stacked("feed_forward.experts.{e}.down_proj"),
}
JAMBA = Family(
    marker="is_jamba_config",
    config=JambaConfig,
    hf=HuggingFace(
        model_type="jamba",
        architecture="JambaForCausalLM",
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "mamba_dt_rank": "auto",
            "pad_token_id": 0,
        },
        names=_NAMES,
        outside=Outside(norm="model.final_layernorm"),
    ),
)
