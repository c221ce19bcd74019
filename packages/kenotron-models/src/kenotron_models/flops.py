"""Floating-point operations and parameters of a decoder, counted from its sizes."""

from __future__ import annotations

from kenotron_models.spec import Architecture


def forward_flops(config: Architecture, batch: int, sequence: int) -> float:
    """Operations of one forward pass over (batch, sequence) tokens; a multiply-add counts two.

    The non-causal convention: scores of a full square, although half of it is masked.
    """
    spec = config.decoder
    layers, width = spec.num_hidden_layers, spec.hidden_size
    heads, kv_heads, head_dim = spec.num_attention_heads, spec.kv_heads, spec.head_dim
    tokens = batch * sequence
    qkv = 2 * tokens * width * (heads + 2 * kv_heads) * head_dim
    scores = 4 * batch * heads * sequence**2 * head_dim
    out = 2 * tokens * width * heads * head_dim
    mlp = 6 * tokens * width * spec.intermediate_size
    head = 2 * tokens * width * spec.vocab_size
    return float(layers * (qkv + scores + out + mlp) + head)


def training_flops(config: Architecture, batch: int, sequence: int) -> float:
    """Operations of forward and backward: three forward passes."""
    return 3 * forward_flops(config, batch, sequence)


def parameter_count(config: Architecture) -> int:
    """Parameters of the whole model, a tied head counted once."""
    spec = config.decoder
    width, head_dim = spec.hidden_size, spec.head_dim
    heads, kv_heads = spec.num_attention_heads, spec.kv_heads
    layer = (2 * heads + 2 * kv_heads) * head_dim * width
    layer += 3 * width * spec.intermediate_size + 2 * width
    layer += (heads + 2 * kv_heads) * head_dim if spec.qkv_bias else 0
    matrices = 1 if spec.tie_word_embeddings else 2
    return spec.num_hidden_layers * layer + matrices * spec.vocab_size * width + width
