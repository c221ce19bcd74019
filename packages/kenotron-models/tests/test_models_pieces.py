"""Norm, rotary positions, attention and feed-forward against plain formulas on one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Axis
from kenotron_models import (
    MLP,
    Attention,
    Context,
    LlamaConfig,
    RMSNorm,
    rotary_angles,
    rotate,
)

ONE = Axis.solo("tp")
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6}


def test_rms_norm() -> None:
    norm, x = RMSNorm(8, 1e-5, ONE), torch.randn(5, 8)
    norm.weight.data.uniform_(0.5, 2)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want)
    assert norm(x.bfloat16()).dtype == torch.float32  # a fp32 weight decides, as in torch


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_is_multiplying_complex_numbers(interleaved: bool) -> None:
    x = torch.randn(2, 7, 3, 8, dtype=torch.float32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 900], [5, 6, 7, 8, 9, 10, 11]])
    cos, sin = rotary_angles(positions, 8, 10_000.0)
    got = rotate(x, cos, sin, interleaved=interleaved)
    pairs = x.unflatten(-1, (4, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    angles = positions[:, :, None, None] * 10_000.0 ** (-torch.arange(4) / 4)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles)
    real = torch.view_as_real(turned)
    want = real.flatten(-2) if interleaved else torch.cat(real.unbind(-1), -1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_only_the_distance_of_positions_counts() -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(a: int, b: int) -> Tensor:
        turned = [
            rotate(x, *rotary_angles(torch.tensor([[p]]), 16, 10_000.0))
            for x, p in ((q, a), (k, b))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_equals_the_formula(kv_heads: int) -> None:
    config = LlamaConfig(**SIZES, num_key_value_heads=kv_heads)
    layer = Attention(config, ONE)
    batch, sequence, width = 2, 5, 4
    x = torch.randn(batch * sequence, 24)
    positions = torch.arange(sequence).expand(batch, sequence)
    parts = F.linear(x, layer.qkv.weight).view(batch, sequence, -1, width)
    q, k, v = parts.split((6, kv_heads, kv_heads), 2)
    cos, sin = rotary_angles(positions, width, config.rope_theta)
    q = rotate(q, cos, sin).transpose(1, 2)
    k, v = (t.repeat_interleave(6 // kv_heads, 2).transpose(1, 2) for t in (rotate(k, cos, sin), v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(width)
    hidden = torch.ones(sequence, sequence).triu(1).bool()
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    want = F.linear(mixed.transpose(1, 2).flatten(0, 1).flatten(1), layer.out.weight)
    torch.testing.assert_close(layer(x, Context(positions)), want, rtol=1e-5, atol=1e-5)


def test_a_gated_feed_forward_equals_the_formula() -> None:
    layer, x = MLP(LlamaConfig(**SIZES), ONE), torch.randn(9, 24)
    gate, up = layer.gate_up.weight.chunk(2)
    want = F.linear(F.silu(x @ gate.T) * (x @ up.T), layer.down.weight)
    torch.testing.assert_close(layer(x), want)


def test_heads_that_do_not_divide() -> None:
    three = Axis("tp", 0, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="cannot split 6 attention heads over 4 tp ranks"):
        Attention(LlamaConfig(**SIZES), three)
    kv = LlamaConfig(hidden_size=24, num_attention_heads=12, num_key_value_heads=3)
    with pytest.raises(ValueError, match="cannot place 3 indivisible parts.*must divide"):
        Attention(kv, Axis("tp", 0, (0, 1)))
