"""The arguments of Qwen2 models, with and without experts (no torch, no YAML here)."""

from dataclasses import dataclass, replace
from typing import Literal

from kenotron_models.config import BACKENDS, LlamaConfig, check
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.spec import DecoderSpec

SLIDING = ("flex_attention", "flash_attention_2", "llama3_ring_attention")
"""What computes attention within a window, in Nanotron."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of a feed-forward: each token is sent to a few of them.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    num_experts: int = 8
    """Experts of a layer."""
    top_k: int = 2
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 1408
    """Width of an expert, in features."""
    shared_expert_intermediate_size: int = 5632
    """Width of the expert that all tokens are sent to, in features."""
    router_aux_loss_coef: float = 0.01
    """Weight of the term that spreads tokens evenly."""
    layers: tuple[int, ...] = (-1,)
    """Layers that have experts; -1 alone: all."""
    enable_shared_expert: bool = False
    """True: one expert sees every token."""
    token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to their experts."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ("num_experts", "top_k", "moe_intermediate_size", "shared_expert_intermediate_size")
        found = [
            f"{name}: {getattr(self, name)} was given; it must be at least 1"
            for name in names
            if getattr(self, name) < 1
        ]
        if self.top_k > self.num_experts:
            found.append(
                f"top_k: {self.top_k} was given; it must not be above num_experts "
                f"({self.num_experts})"
            )
        if found:
            raise ValueError("\n".join(found))


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Sizes and constants of a Qwen2 decoder, under the names that Nanotron gives them.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_llama_config: bool = False
    """Marks another class; always false."""
    is_qwen2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    rope_seq_len_interpolation_factor: float | None = None
    """Positions are divided by this; None: by 1."""
    flex_attention_mask: Literal["sliding_window", "document", "sliding_window_document"] | None = (
        None
    )
    """What a token sees besides the causal rule, under flex_attention's names."""
    sliding_window_size: int | None = None
    """Tokens back that a token sees; None: all."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window, counted from 0."""
    no_rope_layer: int | None = None
    """Every so-manieth layer has no rotary positions; None: all have."""
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
    """Experts in place of the feed-forward; None: none."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *_window_problems(self)]
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
        if self.rope_seq_len_interpolation_factor is not None and self.rope_scaling is not None:
            found.append(
                f"rope_seq_len_interpolation_factor: {self.rope_seq_len_interpolation_factor} was "
                "given; it is rope_scaling of type linear, which is given, too; keep one"
            )
        if found:
            raise ValueError("\n".join(found))

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean; experts are not part of it."""
        factor, mask = self.rope_seq_len_interpolation_factor, self.flex_attention_mask or ""
        linear = None if factor is None else RopeScaling(factor=factor, rope_type="linear")
        return replace(
            super().decoder,
            rope_scaling=linear or self.rope_scaling,
            window=self.sliding_window_size,
            full_attention_layers=self.full_attention_layers,
            no_rope_every=self.no_rope_layer,
            separate_documents=self.use_doc_masking or "document" in mask,
        )


def _window_problems(config: Qwen2Config) -> list[str]:
    size = config.sliding_window_size
    if size is None:
        return []
    if size < 1:
        return [f"sliding_window_size: {size} was given; it must be at least 1, or null"]
    if config.attn_implementation not in (*SLIDING, *BACKENDS, "auto"):
        return [
            f"sliding_window_size: {size} was given; {config.attn_implementation} has no window; "
            "choose attn_implementation auto or " + ", ".join(SLIDING)
        ]
    return []
