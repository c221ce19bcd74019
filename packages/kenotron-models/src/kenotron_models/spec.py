"""What a decoder is made of: the variations that all its architectures are written in.

A family's config (Llama, Qwen2, StarCoder2...) has the names that its users know and says in its
property ``decoder`` what they mean here; layers, counts and conversions read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kenotron_models.rope_scaling import RopeScaling

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
AttentionBackend = Literal["auto", "sdpa", "flash_attn", "blocked", "plain"]


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder: ``x + attention(norm(x))``, ``x + mlp(norm(x))``, so often; norm; head.

    The config that makes one has checked its sizes.
    """

    hidden_size: int
    """D, width of the residual stream, in features."""
    intermediate_size: int
    """F, width of the feed-forward, in features."""
    num_hidden_layers: int
    """Decoder layers."""
    vocab_size: int
    """V, token numbers that exist, without padding."""
    max_position_embeddings: int
    """Longest text the model is meant for, in tokens."""
    tie_word_embeddings: bool = False
    """True: the head is the embedding's own matrix."""

    num_attention_heads: int
    """H, query heads of each layer."""
    kv_heads: int
    """G, key and value heads of each layer; divides H."""
    head_dim: int
    """K, features of a head."""
    attention_scale: float | None = None
    """What scores are multiplied with; None: 1/sqrt(K)."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    out_bias: bool = False
    """Attention's output has a bias."""
    qk_norm: bool = False
    """Queries and keys are normed per head before they are turned (RMSNorm over K)."""
    window: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window."""
    separate_documents: bool = False
    """A token sees its own document only: documents begin where positions do not go on by one."""
    attention: AttentionBackend = "auto"
    """What computes attention; the numbers differ by rounding only. auto: flash_attn where it is
    installed and can run, blocked on the CPU where it is faster, else sdpa."""

    rope_theta: float | None = 10000.0
    """Base of the rotary wave lengths; None: positions do not turn anything."""
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched; None: not at all."""
    rope_interleaved: bool = False
    """True: rotate neighbouring features (0, 1), (2, 3); False: feature i with i + K/2."""
    no_rope_every: int | None = None
    """Layers n - 1, 2n - 1, ... (from 0) have no positions (NoPE); None: all have."""
    learned_positions: bool = False
    """Positions have learned embeddings, added to the tokens'."""

    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    """Kind of all norms of the residual stream."""
    norm_eps: float = 1e-6
    """Added to the mean square, or to the variance."""
    gated: bool = True
    """The feed-forward is ``down(act(gate(x)) * up(x))``; False: ``down(act(up(x)))``."""
    activation: Activation = "silu"
    """Its act."""
    mlp_bias: bool = False
    """Its matrices have biases."""

    embedding_dropout: float = 0.0
    """Share of embedded features that is dropped in training."""
    attention_dropout: float = 0.0
    """Share of attention's probabilities that is dropped in training."""
    residual_dropout: float = 0.0
    """Share of what a block adds that is dropped in training."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's sum in the loss (PaLM, arXiv 2204.02311)."""
    bos_token_id: int | None = None
    """Token number of the beginning of a text; no layer reads it."""
    eos_token_id: int | None = None
    """Token number of the end of a text; no layer reads it."""

    @property
    def decoder(self) -> DecoderSpec:
        """Itself: a spec stands wherever a family's config does."""
        return self

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window_of(self, layer: int) -> int | None:
        """Tokens that a token of this layer sees, itself counted; None: all before it."""
        return None if layer in self.full_attention_layers else self.window

    def rotates(self, layer: int) -> bool:
        """Whether this layer turns queries and keys by their positions."""
        if self.rope_theta is None:
            return False
        return self.no_rope_every is None or (layer + 1) % self.no_rope_every != 0


class Architecture(Protocol):
    """The config of a family of decoders, or a spec."""

    @property
    def decoder(self) -> DecoderSpec:
        """What the decoder is made of."""
        ...
