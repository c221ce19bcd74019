"""Qwen2, with and without experts: Nanotron's keys, and Hugging Face's."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from kenotron_models.families.expert_fields import QWEN_EXPERTS
from kenotron_models.families.fields import (
    SharedFields,
    check,
    marker_problems,
    raise_all,
    window_problems,
    windowed,
)
from kenotron_models.families.hf_keys import (
    first_mixer,
    llama_from_hf,
    llama_to_hf,
    sparse_to_hf,
    windows_from_hf,
    windows_to_hf,
)
from kenotron_models.families.moe_config import MoEConfig, experts_from_hf, experts_to_hf
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(SharedFields):
    """Sizes and constants of a Qwen2 decoder, under the names that Nanotron gives them.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_qwen2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    rope_seq_len_interpolation_factor: float | None = None
    """Positions are divided by this; None: by 1."""
    flex_attention_mask: Literal["sliding_window", "document", "sliding_window_document"] | None = (
        None
    )
    """What a token sees besides the causal rule, under flex_attention's names."""
    sliding_window_size: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window, counted from 0."""
    no_rope_layer: int | None = None
    """Every n-th layer has no rotary positions (NoPE); None: all have."""
    fused_rotary_emb: bool = True
    """No effect: a choice of kernels."""
    fused_rms_norm: bool = True
    """No effect: a choice of kernels."""
    use_qkv_packed: bool = True
    """No effect: a choice of kernels."""
    use_doc_masking: bool = False
    """True: a token sees its own document only."""
    log_attn_probs: bool = False
    """No effect: attention's probabilities are not logged."""
    ring_attn_heads_k_stride: int | None = None
    """Heads sent at a time; of llama3_ring_attention."""
    moe_config: MoEConfig | None = None
    """Experts in place of the feed-forward, in all layers or in some; None: none."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *window_problems(self.sliding_window_size)]
        every = self.no_rope_layer
        if every is not None and (every < 1 or self.num_hidden_layers % every):
            found.append(
                f"no_rope_layer: {every} was given; it must divide num_hidden_layers "
                f"({self.num_hidden_layers})"
            )
        ring = self.attn_implementation == "llama3_ring_attention"
        if ring != (self.ring_attn_heads_k_stride is not None):
            found.append(
                f"ring_attn_heads_k_stride: {self.ring_attn_heads_k_stride} was given; it is a "
                "number with attn_implementation llama3_ring_attention, and null without"
            )
        found += self._interpolation_problems()
        if self.moe_config is not None:
            found += self.moe_config.layer_problems(self.num_hidden_layers)
        raise_all([*found, *marker_problems(self, "is_qwen2_config")])

    def _interpolation_problems(self) -> Iterator[str]:
        if (factor := self.rope_seq_len_interpolation_factor) is None:
            return
        given = f"rope_seq_len_interpolation_factor: {factor} was given; it "
        if not 1 <= factor < float("inf"):
            yield given + "must be a finite number of at least 1"
        if self.rope_scaling is not None:
            yield given + "is rope_scaling of type linear, which is given, too; keep one"

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of windows and positions of a narrow copy."""
        return {
            "sliding_window_size": sizes.window(self.sliding_window_size),
            "full_attention_layers": sizes.some_layers(
                self.full_attention_layers, self.num_hidden_layers
            ),
            "no_rope_layer": None if self.no_rope_layer is None else sizes.period,
            "moe_config": self.moe_config and self.moe_config.small(sizes, self.num_hidden_layers),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        factor, mask = self.rope_seq_len_interpolation_factor, self.flex_attention_mask or ""
        linear = None if factor is None else RopeScaling(factor=factor, rope_type="linear")
        mixer, every = self.attention(), self.no_rope_layer
        assert mixer.rope is not None  # all but the layers below turn
        mixer = replace(
            mixer,
            rope=replace(mixer.rope, scaling=linear or self.rope_scaling),
            separate_documents=self.use_doc_masking or "document" in mask,
        )
        window, full = self.sliding_window_size, self.full_attention_layers
        mixers = windowed(mixer, window, full, self.num_hidden_layers)
        if every is not None:
            mixers[every - 1 :: every] = [replace(m, rope=None) for m in mixers[every - 1 :: every]]
        experts = None if self.moe_config is None else self.moe_config.feed_forwards(len(mixers))
        return self.decoder_of(mixers, experts)


def _read(values: Values) -> Qwen2Config:
    return Qwen2Config(**llama_from_hf(values), **windows_from_hf(values), attention_bias=True)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**llama_to_hf(spec), **windows_to_hf(spec)}


def _read_experts(values: Values) -> Qwen2Config:
    bias, experts = values["qkv_bias"], experts_from_hf(values)
    windows = windows_from_hf({"max_window_layers": 0, **values})  # it has none
    return Qwen2Config(**llama_from_hf(values), **windows, attention_bias=bias, moe_config=experts)


def _write_experts(spec: DecoderSpec) -> dict[str, Any]:
    return {
        **sparse_to_hf(spec), **experts_to_hf(spec), "qkv_bias": first_mixer(spec).qkv_bias,
        "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip


QWEN2_MOE = HuggingFace(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.001,
        "qkv_bias": True,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    only={
        "hidden_act": ("silu",),
        "attention_dropout": (0, None),
        "use_sliding_window": (False, None),
    },
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
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            "max_window_layers": 28,
            "sliding_window": 4096,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
        read=_read,
        write=_write,
        names=QWEN_EXPERTS,
    ),
    others=(QWEN2_MOE,),
)
