"""Qwen3-Next (Qwen, 2025): gated delta rules, every fourth layer gated attention, and experts."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kenotron_models.attention import AttentionSpec
from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import QWEN_EXPERTS, only_experts
from kenotron_models.families.fields import at_least, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import (
    experts_of,
    first_mixer,
    first_of,
    llama_from_hf,
    sparse_to_hf,
)
from kenotron_models.families.hybrid_layers import HybridFields, layer_words
from kenotron_models.families.moe_config import qwen_experts_to_hf
from kenotron_models.families.partial_rope import share_problems, small_share
from kenotron_models.families.qwen_experts import QwenExpertFields, expert_fields_from_hf
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.gated_delta import GatedDeltaSpec
from kenotron_models.hf_rope import FULL, LINEAR, share_from_hf
from kenotron_models.hf_tensors import Fused
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

_WORDS = {GatedDeltaSpec: LINEAR, AttentionSpec: FULL}
_LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(QwenExpertFields, HybridFields):
    """Sizes and constants of a Qwen3-Next decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    words: ClassVar = {"L": LINEAR, "*": FULL}
    is_qwen3_next_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    layers: str | None = None
    """A letter for each layer: L gated delta rule, * attention; | between the stages of a pipeline.
    None: layer_types."""
    layer_types: tuple[str, ...] | None = None
    """`linear_attention` or `full_attention` for each layer; None: layers says it, or
    full_attention_interval."""
    full_attention_interval: int = 4
    """Every n-th layer has attention where neither layers nor layer_types is given."""
    head_dim: int | None = 256
    """Features of one head of attention; None: hidden_size over num_attention_heads."""
    attention_bias: bool = False
    """True: queries, keys, values and the output have a bias."""
    partial_rotary_factor: float = 0.25
    """Share of a head's features that positions turn, its first ones."""
    linear_num_key_heads: int = 16
    """Key heads of a gated delta rule."""
    linear_num_value_heads: int = 32
    """Its value heads; a multiple of its key heads."""
    linear_key_head_dim: int = 128
    """Features of its keys."""
    linear_value_head_dim: int = 128
    """Features of its values."""
    linear_conv_kernel_dim: int = 4
    """Width of its convolution, in tokens."""
    num_experts: int = 512
    """Experts of a layer."""
    num_experts_per_tok: int = 10
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 512
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    shared_expert_intermediate_size: int = 512
    """Width of the expert that all tokens are sent to, in features; its result is multiplied by a
    sigmoid of the token."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = (*_LINEAR_SIZES, "shared_expert_intermediate_size", "full_attention_interval")
        sizes = at_least(1, {name: getattr(self, name) for name in names})
        found = [*check(self), *sizes, *self.layer_problems()]
        if not found:
            found += share_problems(self.partial_rotary_factor, self.features_of_head)
            found += self.expert_field_problems("a dense family")
            keys, values = self.linear_num_key_heads, self.linear_num_value_heads
            if values % keys:
                found.append(
                    f"linear_num_key_heads: {keys} was given; it must divide "
                    f"linear_num_value_heads ({values})"
                )
        raise_all([*found, *marker_problems(self, "is_qwen3_next_config")])

    def pattern(self) -> str:
        """Return the letters of all layers where the config does not say them."""
        every = self.full_attention_interval
        return "".join("L" if (i + 1) % every else "*" for i in range(self.num_hidden_layers))

    @property
    def cut_sizes(self) -> dict[str, int]:
        """What tp cuts, by its key."""
        names = {
            "num_attention_heads": "*" in self.letters,
            "linear_num_key_heads": "L" in self.letters,
            "intermediate_size": len(self.layers_with_experts) < self.num_hidden_layers,
            "shared_expert_intermediate_size": True,
        }
        return {name: getattr(self, name) for name, there in names.items() if there}

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of layers, experts and positions of a narrow copy."""
        width = min(sizes.head_dim, self.features_of_head)
        each = min(self.linear_num_value_heads // self.linear_num_key_heads, 2)
        return {
            **QwenExpertFields.small_layers(self, sizes),
            **self.small_letters(sizes, "*"),
            "partial_rotary_factor": small_share(self.partial_rotary_factor, width),
            "linear_num_key_heads": sizes.heads,
            "linear_num_value_heads": sizes.heads * each,
            "linear_key_head_dim": min(self.linear_key_head_dim, sizes.head_dim),
            "linear_value_head_dim": min(self.linear_value_head_dim, sizes.head_dim),
            "shared_expert_intermediate_size": sizes.tp * sizes.head_dim,
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        norm = NormSpec(kind="offset_rms_norm", eps=self.rms_norm_eps)
        plain = self.attention()
        assert plain.rope is not None  # all layers of attention have positions
        attention = replace(
            plain,
            rope=replace(plain.rope, share=self.partial_rotary_factor),
            qk_norm=norm,
            gate=True,
            out_bias=self.attention_bias,
            separate_documents=self.use_doc_masking,
        )
        delta = GatedDeltaSpec(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            width=self.linear_conv_kernel_dim,
            eps=self.rms_norm_eps,
            separate_documents=self.use_doc_masking,
        )
        experts = ExpertsSpec(
            router=self.router,
            features=self.moe_intermediate_size,
            shared_features=self.shared_expert_intermediate_size,
            shared_gate=True,
        )
        mixers = self.by_letter({"L": delta, "*": attention})
        spec = self.decoder_of(mixers, self.routed(experts, self.layers_with_experts), norm)
        return replace(spec, stage_starts=self.stage_starts)


def _read(values: Values) -> Qwen3NextConfig:
    kinds = values.get("layer_types")
    return Qwen3NextConfig(
        **llama_from_hf(values, partial=True),
        **expert_fields_from_hf(values),
        **{name: values[name] for name in _LINEAR_SIZES},
        layer_types=None if kinds is None else tuple(kinds),
        full_attention_interval=values["full_attention_interval"],
        partial_rotary_factor=share_from_hf(values),
        attention_bias=bool(values["attention_bias"]),
        shared_expert_intermediate_size=values["shared_expert_intermediate_size"],
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    """Keys of the parts; of gated delta rules where no layer has one, the defaults of theirs."""
    mixer, experts = first_mixer(spec), only_experts(spec, experts_of(spec))
    found = {
        **sparse_to_hf(spec),
        **qwen_experts_to_hf(spec),
        "layer_types": layer_words(spec, _WORDS),
        "attention_bias": mixer.qkv_bias,
        "partial_rotary_factor": 1.0 if mixer.rope is None else mixer.rope.share,
        "shared_expert_intermediate_size": experts.shared_features,
    }
    if (delta := first_of(spec, GatedDeltaSpec)) is not None:
        sizes = (
            delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.width,
        )  # fmt: skip
        found |= dict(zip(_LINEAR_SIZES, sizes, strict=True))
    return found


QWEN3_NEXT = Family(
    marker="is_qwen3_next_config",
    config=Qwen3NextConfig,
    hf=HuggingFace(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "router_aux_loss_coef": 0.001,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
        read=_read,
        write=_write,
        names={
            **QWEN_EXPERTS,
            "gated_delta_norm": Fused("input_layernorm"),
            "gated_delta": Fused("linear_attn"),
            "gated_delta.in_proj": Fused("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
            "gated_delta.conv": Fused("linear_attn.conv1d"),
            "gated_delta.norm": Fused("linear_attn.norm"),
            "gated_delta.out_proj": Fused("linear_attn.out_proj"),
        },
    ),
)
