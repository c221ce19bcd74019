"""Norm, rotary positions, attention and feed-forward against plain formulas on one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron_dist import Axis
from kenotron_models import Build, Context, build_decoder
from kenotron_models.decoder import LayerStack
from kenotron_models.families import LlamaConfig
from kenotron_models.layers import MLP, Attention, MLPSpec, RMSNorm, rotary_angles, rotate

ONE = Axis.solo("tp")
HERE = Build(ONE, device="cpu")
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6}


def test_rms_norm() -> None:
    norm, x = RMSNorm(8, 1e-5, HERE), torch.randn(5, 8)
    norm.weight.data.uniform_(0.5, 2)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want)
    assert norm(x.bfloat16()).dtype == torch.float32  # a fp32 weight decides, as in torch


def test_rms_norm_rounds_once() -> None:
    norm, x = (
        RMSNorm(64, 1e-5, Build(ONE, device="cpu", dtype=torch.bfloat16)),
        torch.randn(50, 64).bfloat16(),
    )
    norm.weight.data.uniform_(0.5, 2)
    wide, weight = x.double(), norm.weight.detach().double()
    want = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight).bfloat16()
    assert (norm(x) != want).float().mean() < 0.01  # with two roundings a quarter of them


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


def rotated_plainly(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """What ``rotate`` computes, with autograd's own gradient."""
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return turned.to(x.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotating_and_its_gradient_have_the_bits_of_the_plain_formula(
    dtype: torch.dtype, interleaved: bool
) -> None:
    whole = torch.randn(2, 9, 7, 8).to(dtype).requires_grad_()
    cos, sin = rotary_angles(torch.arange(9).expand(2, 9), 8, 10_000.0)
    dy, found = torch.randn(2, 9, 5, 8).to(dtype), []
    for turn in (lambda x: rotate(x, cos, sin, interleaved=interleaved),
                 lambda x: rotated_plainly(x, cos, sin, interleaved)):  # fmt: skip
        y = turn(whole[:, :, :5])  # values are behind queries and keys
        assert y.dtype == dtype
        found.append((y, *torch.autograd.grad(y, whole, dy)))
    assert all(torch.equal(ours, plain) for ours, plain in zip(*found, strict=True))


def test_a_rotation_is_differentiable_twice() -> None:
    angles = [each.double() for each in rotary_angles(torch.arange(3)[None], 4, 10_000.0)]
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, *angles).square(), (x,))


class Casts(TorchDispatchMode):
    """Count the operations that only change a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_layer_in_bfloat16_casts_in_its_norms_alone() -> None:
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    build = Build(ONE, device="cpu", dtype=torch.bfloat16)
    layer = LayerStack(build_decoder(config, build)[1:2])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(14, 24).bfloat16().requires_grad_()
    context = Context(torch.arange(7).repeat(2, 1))
    layer(x, context)  # the angles are made once for all layers
    with Casts() as forward:
        y = layer(x, context)
    with Casts() as backward:
        y.sum().backward()
    # torch's RMSNorm on the CPU: its input and output, their gradients, and the weight's gradient
    assert forward.count <= 4 and backward.count <= 6


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
    layer = Attention(config.attention(), 24, HERE)
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
    layer, x = MLP(MLPSpec(features=40), 24, HERE), torch.randn(9, 24)
    gate, up = layer.gate_up.weight.chunk(2)
    want = F.linear(F.silu(x @ gate.T) * (x @ up.T), layer.down.weight)
    torch.testing.assert_close(layer(x), want)


def test_heads_that_do_not_divide() -> None:
    three = Axis("tp", 0, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="cannot split 6 attention heads over 4 tp ranks"):
        Attention(LlamaConfig(**SIZES).attention(), 24, Build(three))
    kv = LlamaConfig(hidden_size=24, num_attention_heads=12, num_key_value_heads=3)
    with pytest.raises(ValueError, match="cannot place 3 indivisible parts.*must divide"):
        Attention(kv.attention(), 24, Build(Axis("tp", 0, (0, 1))))
