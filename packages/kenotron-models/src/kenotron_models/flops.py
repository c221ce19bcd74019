"""Floating-point operations and parameters of a decoder, counted from its sizes."""

from __future__ import annotations

from kenotron_models.config import LlamaConfig


def forward_flops(config: LlamaConfig, batch: int, sequence: int) -> float:
    """Operations of one forward pass over (batch, sequence) tokens; a multiply-add counts two.

    The non-causal convention: scores of a full square, although half of it is masked.
    """
    layers, width = config.num_hidden_layers, config.hidden_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.kv_heads, config.head_dim
    tokens = batch * sequence
    qkv = 2 * tokens * width * (heads + 2 * kv_heads) * head_dim
    scores = 4 * batch * heads * sequence**2 * head_dim
    out = 2 * tokens * width * heads * head_dim
    mlp = 6 * tokens * width * config.intermediate_size
    head = 2 * tokens * width * config.vocab_size
    return float(layers * (qkv + scores + out + mlp) + head)


def training_flops(config: LlamaConfig, batch: int, sequence: int) -> float:
    """Operations of forward and backward: three forward passes."""
    return 3 * forward_flops(config, batch, sequence)


def parameter_count(config: LlamaConfig) -> int:
    """Parameters of the whole model, a tied head counted once."""
    width, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.kv_heads
    layer = (2 * heads + 2 * kv_heads) * head_dim * width
    layer += 3 * width * config.intermediate_size + 2 * width
    layer += (heads + 2 * kv_heads) * head_dim if config.attention_bias else 0
    matrices = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + matrices * config.vocab_size * width + width
