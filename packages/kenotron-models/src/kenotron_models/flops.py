"""Floating-point operations and parameters of a decoder, counted from its sizes.

A multiply-add counts two. Two conventions are in use for the scores of attention: the full square,
although half of it is masked (`causal=False`: Nanotron, PaLM's MFU), and what a token really sees
(`causal=True`: Megatron-LM since 2024, FlashAttention).
"""

from __future__ import annotations

from kenotron_models.spec import Architecture


def forward_flops(
    config: Architecture, batch: int, sequence: int, *, causal: bool = False
) -> float:
    """Operations of one forward pass over (batch, sequence) tokens.

    Matrix products alone are counted. ``causal``: only scores that are seen, of the window where
    the layer has one; documents are not known here and count as one.
    """
    spec = config.decoder
    width, features = spec.hidden_size, spec.head_dim
    heads, kv_heads, tokens = spec.num_attention_heads, spec.kv_heads, batch * sequence
    qkv = 2 * tokens * width * (heads + 2 * kv_heads) * features
    out = 2 * tokens * width * heads * features
    mlp = (6 if spec.gated else 4) * tokens * width * spec.intermediate_size
    head = 2 * tokens * width * spec.vocab_size
    scores = sum(
        4 * batch * heads * features * _pairs(sequence, spec.window_of(layer), causal)
        for layer in range(spec.num_hidden_layers)
    )
    return float(spec.num_hidden_layers * (qkv + out + mlp) + scores + head)


def training_flops(
    config: Architecture, batch: int, sequence: int, *, causal: bool = False
) -> float:
    """Operations of forward and backward: three forward passes; nothing computed again counts."""
    return 3 * forward_flops(config, batch, sequence, causal=causal)


def parameter_count(config: Architecture) -> int:
    """Parameters of the whole model, a tied head counted once."""
    spec = config.decoder
    width, features, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
    heads, kv_heads = spec.num_attention_heads, spec.kv_heads
    norm = width if spec.norm == "rms_norm" else 2 * width
    layer = (2 * heads + 2 * kv_heads) * features * width + 2 * norm
    layer += (heads + 2 * kv_heads) * features if spec.qkv_bias else 0
    layer += width if spec.out_bias else 0
    layer += 2 * features if spec.qk_norm else 0
    ups = 2 if spec.gated else 1
    layer += (ups + 1) * width * inner
    layer += ups * inner + width if spec.mlp_bias else 0
    matrices = 1 if spec.tie_word_embeddings else 2
    places = spec.max_position_embeddings * width if spec.learned_positions else 0
    return spec.num_hidden_layers * layer + matrices * spec.vocab_size * width + places + norm


def _pairs(sequence: int, window: int | None, causal: bool) -> int:
    """Pairs of a token and one that it sees, in one row."""
    if not causal:
        return sequence**2
    seen = min(window or sequence, sequence)
    return seen * (seen + 1) // 2 + (sequence - seen) * seen
