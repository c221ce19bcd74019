"""The layer's own variations: norms of queries and keys, positions, biases, scale, reuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_cases import formula, positions, seen
from torch import Tensor

import kenotron_models.attention_mix as attention_module
from kenotron_dist import Axis
from kenotron_dist.placement import Chunk, Shard
from kenotron_models import Build, Context
from kenotron_models.attention_backends import keep_out_of_programs
from kenotron_models.families import Qwen2Config
from kenotron_models.layers import (
    Attention,
    AttentionSpec,
    Block,
    BlockSpec,
    MLPSpec,
    NormSpec,
    Rope,
    RopeScaling,
    rotary_angles,
    rotate,
)
from kenotron_models.recompute import Recompute

HERE = Build(Axis.solo("tp"), device="cpu")
SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=6)
WIDTH = 20
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
ROPE = Rope(scaling=YARN)
QWEN2 = Qwen2Config(
    hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, vocab_size=32, max_position_embeddings=64,
)  # fmt: skip
CHANGES = {
    "qk_norm": {"qk_norm": NormSpec(eps=1e-3)},
    "norm of the width": {"qk_norm": NormSpec(eps=1e-3), "qk_norm_over": "width"},
    "biases": {"qkv_bias": True, "out_bias": True},
    "scale": {"scale": 1 / 6},
    "no positions": {"rope": None},
    "interleaved": {"rope": Rope(interleaved=True, theta=500.0)},
    "yarn": {"rope": ROPE},
    "a part turns": {"rope": Rope(share=0.7)},
    "a part turns, interleaved": {"rope": Rope(share=0.4, interleaved=True)},
    "window": {"window": 3},
    "documents": {"separate_documents": True},
    "everything": {
        "qk_norm": NormSpec(), "out_bias": True, "window": 4, "separate_documents": True,
        "rope": ROPE,
    },
}  # fmt: skip
OF_LAYERS = {
    "no positions here": {"no_rope_layer": 3},
    "full layer": {"sliding_window_size": 3, "full_attention_layers": (2,)},
}
"""What a family's config says of layer 2 alone."""


def changed(name: str) -> AttentionSpec:
    if name in CHANGES:
        return replace(SPEC, **CHANGES[name])
    mixer = replace(QWEN2, **OF_LAYERS[name]).decoder.blocks[2].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def expected(layer: Attention, spec: AttentionSpec, x: Tensor, places: Tensor) -> Tensor:
    """The layer written out from its spec."""
    parts = F.linear(x, layer.qkv.weight, layer.qkv.bias).view(*places.shape, 8, 6)
    q, k, v = parts.split((4, 2, 2), 2)
    if spec.qk_norm is not None:
        eps, over = spec.qk_norm.eps, (-1,) if spec.qk_norm_over == "head" else (-2, -1)
        q, k = (
            y / (y.square().mean(over, keepdim=True) + eps).sqrt() * norm.weight.view(-1, 6)
            for y, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    if (rope := spec.rope) is not None:
        n = {1.0: 6, 0.7: 4, 0.4: 2}[rope.share]
        angles = rotary_angles(places, n, rope.theta, rope.scaling)
        q, k = (
            torch.cat([rotate(y[..., :n], *angles, interleaved=rope.interleaved), y[..., n:]], -1)
            for y in (q, k)
        )
    mask = seen(places, spec.window, spec.separate_documents)
    mixed = formula(q, k, v, mask, spec.scale or 6**-0.5).float()
    return F.linear(mixed.flatten(0, 1).flatten(1), layer.out.weight, layer.out.bias)


@pytest.mark.parametrize("name", [*CHANGES, *OF_LAYERS])
def test_a_variation_is_what_it_says(name: str) -> None:
    spec = changed(name)
    layer, places, x = Attention(spec, WIDTH, HERE, layer=2), positions(15), torch.randn(45, 20)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    got = layer(x, Context(places))
    torch.testing.assert_close(got, expected(layer, spec, x, places), rtol=2e-5, atol=2e-4)
    plain = Attention(SPEC, WIDTH, HERE, layer=2)
    plain.load_state_dict(layer.state_dict(), strict=False)
    same = torch.allclose(got, plain(x, Context(places)), rtol=1e-3, atol=1e-3)
    assert same == (name == "full layer")


def test_norms_of_queries_and_keys_are_partial() -> None:
    layer = Attention(replace(SPEC, qk_norm=NormSpec()), WIDTH, Build(Axis("tp", 1, (0, 1))))
    for norm in (layer.q_norm, layer.k_norm):
        assert norm.weight.shape == (6,)
        assert [p.axis for p in norm.placements.values()] == ["tp"]  # type: ignore[union-attr]


def test_a_norm_of_the_width_is_cut_with_the_heads() -> None:
    spec = replace(SPEC, qk_norm=NormSpec(), qk_norm_over="width")
    layer = Attention(spec, WIDTH, Build(Axis("tp", 1, (0, 1, 2, 3))))
    for norm, heads in ((layer.q_norm, 4), (layer.k_norm, 2)):
        assert norm.weight.shape == (6,)
        assert norm.placements == {"weight": Shard("tp", 0, (Chunk(heads * 6, parts=heads),))}
    other = replace(spec, qk_norm=NormSpec(kind="layer_norm"))
    with pytest.raises(ValueError, match="qk_norm: layer_norm was given; .* must be rms_norm"):
        Attention(other, WIDTH, HERE)


def test_yarn_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RopeScaling(rope_type="yarn", factor=8.0, original_max_position_embeddings=256)
    place = torch.tensor([[1]])
    cos, sin = (x[0, 0, 0] for x in rotary_angles(place, 64, 1e4, scaling))
    assert torch.hypot(cos, sin).tolist() == pytest.approx([0.1 * math.log(8) + 1] * 32)
    plain = torch.atan2(*(x[0, 0, 0] for x in reversed(rotary_angles(place, 64, 1e4))))
    ratio = torch.atan2(sin, cos) / plain
    torch.testing.assert_close(ratio[0], torch.tensor(1.0))
    torch.testing.assert_close(ratio[-1], torch.tensor(1 / 8))
    assert (ratio.diff() <= 1e-6).all()
    given = replace(scaling, attention_factor=1.0)
    cos, sin = rotary_angles(place, 64, 1e4, given)
    torch.testing.assert_close(torch.hypot(cos, sin), torch.ones_like(cos))


def layers(recompute: Recompute = "none", every: int = 9, **changes: object) -> list[Block]:
    """Four blocks; every n-th has no positions."""
    torch.manual_seed(0)
    spec = replace(SPEC, qk_norm=NormSpec(), separate_documents=True, **changes)
    ropes = [None if i % every == every - 1 else spec.rope for i in range(4)]
    mlp = MLPSpec(features=16)
    blocks = [BlockSpec(mixer=replace(spec, rope=rope), feed_forward=mlp) for rope in ropes]
    return [
        Block(block, WIDTH, HERE, layer=i, recompute=recompute) for i, block in enumerate(blocks)
    ]


def numbers(stack: list[Block], run: list) -> list[Tensor]:
    """Output and all gradients of a fixed input."""
    x, context = torch.arange(900.0).view(45, 20).sin().requires_grad_(), Context(positions(15))
    y = x
    for function in run:
        y = function(y, context)
    parameters = [p for layer in stack for p in layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def test_angles_and_masks_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = [], attention_module.rotary_angles
    monkeypatch.setattr(attention_module, "rotary_angles", lambda *a: calls.append(a) or made(*a))
    stack = layers(window=4)
    numbers(stack, stack)
    assert len(calls) == 1
    stack[0].attention.prepare(context := Context(positions(15)))
    before = dict(context._made)
    stack[3](torch.randn(45, 20), context)
    assert context._made.keys() == before.keys()


@pytest.mark.parametrize("recompute", ["full", "selective", "mixer", "feed_forward"])
@pytest.mark.parametrize(
    ("backend", "over"), [("sdpa", "head"), ("blocked", "width"), ("plain", "head")]
)
def test_computing_again_changes_nothing(backend: str, over: str, recompute: Recompute) -> None:
    stack, again = (
        layers(window=4, backend=backend, qk_norm_over=over, recompute=r)
        for r in ("none", recompute)
    )
    for a, b in zip(numbers(again, again), numbers(stack, stack), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' .grad
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
def test_a_compiled_layer_computes_the_same(backend: str, prepared: bool) -> None:
    keep_out_of_programs()
    over = "width" if backend == "sdpa" else "head"
    stack = layers(window=4, backend=backend, qk_norm_over=over, every=2)
    want = numbers(stack, stack)
    compiled = [torch.compile(layer, backend="aot_eager") for layer in stack]

    def call(index: int):
        def run(x: Tensor, context: Context) -> Tensor:
            if prepared:
                stack[index].attention.prepare(context)
            return compiled[index](x, context)

        return run

    for _ in range(2):  # the second micro-batch has a context of its own
        got = numbers(stack, [call(i) for i in range(4)])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
