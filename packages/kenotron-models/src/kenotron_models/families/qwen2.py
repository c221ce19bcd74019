"""Qwen2, with and without experts: Nanotron's keys, and Hugging Face's."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from kenotron_models.families.hf_keys import keys_from_hf, part_to_hf, table_defaults
from kenotron_models.families.keys import Rule, key, marker
from kenotron_models.families.moe_config import MoEConfig
from kenotron_models.families.places import MISSING, in_spec
from kenotron_models.families.rope_keys import NanotronKeys
from kenotron_models.families.routing_keys import QWEN_EXPERTS
from kenotron_models.families.window_keys import QWEN_DEFAULTS, QwenWindowKeys
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.rope import Rope
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

FROM_ONE = Rule(lambda x: 1 <= x < float("inf"), "it must be a finite number of at least 1")


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(NanotronKeys, QwenWindowKeys):
    """Sizes and constants of a Qwen2 decoder, under the names that Nanotron gives them."""

    is_qwen2_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    rope_seq_len_interpolation_factor: float | None = key(None, rule=FROM_ONE)
    """Positions are divided by this; None: by 1."""
    flex_attention_mask: Literal["sliding_window", "document", "sliding_window_document"] | None = (
        key(None)
    )
    """Mask of a token besides the causal rule, under flex_attention's names."""
    no_rope_layer: int | None = key(
        None, least=1, divides="num_hidden_layers", small=lambda sizes, _: sizes.period
    )
    """Every n-th layer has no rotary positions (NoPE); None: all have."""
    fused_rotary_emb: bool = key(True)
    """No effect: a choice of kernels."""
    fused_rms_norm: bool = key(True)
    """No effect: a choice of kernels."""
    use_qkv_packed: bool = key(True)
    """No effect: a choice of kernels."""
    use_doc_masking: bool = key(False)
    """True: a token sees its own document only."""
    log_attn_probs: bool = key(False)
    """No effect: attention's probabilities are not logged."""
    ring_attn_heads_k_stride: int | None = key(None)
    """Heads sent at a time; of llama3_ring_attention."""
    moe_config: MoEConfig | None = key(None)
    """Experts in place of the feed-forward, in all layers or in some; None: none."""

    def problems(self) -> list[str]:
        """Name values that do not go together."""
        found = super().problems()
        ring = self.attn_implementation == "llama3_ring_attention"
        if ring != (self.ring_attn_heads_k_stride is not None):
            found.append(
                f"ring_attn_heads_k_stride: {self.ring_attn_heads_k_stride} was given; it is a "
                "number with attn_implementation llama3_ring_attention, and null without"
            )
        factor = self.rope_seq_len_interpolation_factor
        if factor is not None and self.rope_scaling is not None:
            found.append(
                f"rope_seq_len_interpolation_factor: {factor} was given; it is rope_scaling of "
                "type linear, which is given, too; keep one"
            )
        if self.moe_config is not None:
            found += self.moe_config.layer_problems(self.num_hidden_layers)
        return found

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the experts of a narrow copy."""
        experts = self.moe_config and self.moe_config.small_of(sizes, self.num_hidden_layers)
        return super().small_keys(sizes) | {"moe_config": experts}

    def rope(self) -> Rope | None:
        """Return the rotary positions of a layer that has some."""
        rope, factor = super().rope(), self.rope_seq_len_interpolation_factor
        if rope is None or factor is None:
            return rope
        return replace(rope, scaling=RopeScaling(factor=factor, rope_type="linear"))

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        documents = self.use_doc_masking or "document" in (self.flex_attention_mask or "")
        mixers = self.windowed(self.attention(separate_documents=documents))
        if (every := self.no_rope_layer) is not None:
            mixers[every - 1 :: every] = [replace(m, rope=None) for m in mixers[every - 1 :: every]]
        experts = None if self.moe_config is None else self.moe_config.feed_forwards(len(mixers))
        return self.decoder_of(mixers, experts)


def _read(values: Values) -> Qwen2Config:
    return Qwen2Config(**keys_from_hf(Qwen2Config, values) | {"attention_bias": True})


def _read_experts(values: Values) -> Qwen2Config:
    experts = MoEConfig(**keys_from_hf(MoEConfig, values))
    own: dict[str, Any] = {"attention_bias": values["qkv_bias"], "moe_config": experts}
    return Qwen2Config(**keys_from_hf(Qwen2Config, values) | own)


def _write_experts(spec: DecoderSpec) -> dict[str, Any]:
    none = {"use_sliding_window": False, "sliding_window": None}
    dense = dict.fromkeys(("max_window_layers", "layer_types"), MISSING)  # which it has not
    bias = {"qkv_bias": in_spec(spec, "attention.qkv_bias")}
    return part_to_hf(MoEConfig, spec) | bias | none | dense


QWEN2_MOE = HuggingFace(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        **table_defaults(MoEConfig),
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.001,
        "qkv_bias": True,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    only={"use_sliding_window": (False, None)},
    read=_read_experts,
    write=_write_experts,
    names=QWEN_EXPERTS,
)
QWEN2 = Family(
    marker="is_qwen2_config",
    config=Qwen2Config,
    hf=HuggingFace(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults=QWEN_DEFAULTS,
        read=_read,
        names=QWEN_EXPERTS,
    ),
    others=(QWEN2_MOE,),
)
