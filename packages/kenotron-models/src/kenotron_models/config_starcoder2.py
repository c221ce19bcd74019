"""The arguments of StarCoder2 models (no torch, no YAML here)."""

from dataclasses import dataclass

from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.spec import Activation, DecoderSpec

ACTIVATIONS: dict[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu",
    "silu": "silu",
}  # fmt: skip
"""Names of activations in transformers, and ours."""


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config:
    """Sizes and constants of a StarCoder2 decoder, under the names that Nanotron gives them.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    activation_function: str = "gelu_pytorch_tanh"
    """Activation of the feed-forward."""
    attention_softmax_in_fp32: bool = True
    """No effect: the softmax is always computed in float32."""
    attn_pdrop: float = 0.1
    """Share of attention's probabilities that is dropped in training."""
    bos_token_id: int | None = 49152
    """Token number of the beginning of a text."""
    embd_pdrop: float = 0.1
    """Share of embedded features that is dropped in training."""
    eos_token_id: int | None = 49152
    """Token number of the end of a text."""
    global_attn_layers: tuple[int, ...] = ()
    """Layers without the sliding window."""
    grouped_query: bool = False
    """True: several query heads share a key and value head."""
    hidden_size: int = 2048
    """Width of the residual stream, in features."""
    initializer_range: float = 0.02
    """Standard deviation that Hugging Face would draw with; recorded for export only."""
    intermediate_size: int | None = None
    """Width of the feed-forward, in features; None: four times hidden_size."""
    is_starcoder2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance inside every LayerNorm."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for, in tokens."""
    multi_query: bool = False
    """True: all query heads share one key and value head; so it is too when grouped_query is
    false."""
    num_attention_heads: int = 16
    """Query heads of each layer."""
    num_hidden_layers: int = 24
    """Decoder layers."""
    num_kv_heads: int | None = None
    """Key and value heads of grouped_query."""
    resid_pdrop: float = 0.1
    """Share of what a block adds that is dropped in training."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary positions; None: none."""
    rope_theta: float = 10000.0
    """Base of the rotary wave lengths."""
    scale_attention_softmax_in_fp32: bool = True
    """No effect: the softmax is always computed in float32."""
    scale_attn_weights: bool = True
    """True: scores are divided by the root of the features of a head."""
    sliding_window_size: int | None = None
    """Tokens back that a token sees; None: all."""
    tie_word_embeddings: bool = True
    """True: the head is the embedding's own matrix."""
    use_position_embeddings: bool = False
    """True: positions have learned embeddings."""
    use_rotary_embeddings: bool = True
    """True: positions turn queries and keys."""
    vocab_size: int = 49280
    """Token numbers that exist, without padding."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        found = [
            f"{name}: {getattr(self, name)} was given; it must be at least 1"
            for name in names
            if getattr(self, name) < 1
        ]
        found += self._head_problems() if not found else []
        if self.activation_function not in ACTIVATIONS:
            found.append(
                f"activation_function: {self.activation_function!r} was given; it must be one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            if not 0 <= (share := getattr(self, name)) < 1:
                found.append(f"{name}: {share} was given; it must be at least 0, below 1")
        if self.use_position_embeddings == self.use_rotary_embeddings:
            found.append(
                f"use_position_embeddings: {str(self.use_position_embeddings).lower()} was given; "
                "exactly one of it and use_rotary_embeddings must be true"
            )
        if not self.is_starcoder2_config:
            found.append("is_starcoder2_config: false was given; it must be true, or be left out")
        if found:
            raise ValueError("\n".join(found))

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer: one unless they are grouped."""
        return self.num_kv_heads or self.num_attention_heads if self.grouped_query else 1

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        return DecoderSpec(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size or 4 * self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=self.tie_word_embeddings,
            num_attention_heads=self.num_attention_heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            attention_scale=None if self.scale_attn_weights else 1.0,
            qkv_bias=True,
            out_bias=True,
            window=self.sliding_window_size,
            full_attention_layers=self.global_attn_layers,
            rope_theta=self.rope_theta if self.use_rotary_embeddings else None,
            rope_scaling=self.rope_scaling if self.use_rotary_embeddings else None,
            learned_positions=self.use_position_embeddings,
            norm="layer_norm",
            norm_eps=self.layer_norm_epsilon,
            gated=False,
            activation=ACTIVATIONS[self.activation_function],
            mlp_bias=True,
            embedding_dropout=self.embd_pdrop,
            attention_dropout=self.attn_pdrop,
            residual_dropout=self.resid_pdrop,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
        )

    def _head_problems(self) -> list[str]:
        found = []
        if self.hidden_size % self.num_attention_heads:
            found.append(
                f"hidden_size: {self.hidden_size} was given; it must be a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if self.grouped_query and self.multi_query:
            found.append("multi_query: true was given; it excludes grouped_query")
        if self.grouped_query and self.num_kv_heads is None:
            found.append("num_kv_heads: nothing was given; grouped_query needs a number")
        if (kv := self.kv_heads) < 1 or self.num_attention_heads % kv:
            found.append(
                f"num_kv_heads: {kv} was given; it must divide num_attention_heads "
                f"({self.num_attention_heads})"
            )
        return found
