"""Caps of scores, sinks and output gates: every back end, the cache, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import deviation, inputs, positions, seen, sight_of, with_gradients
from torch import Tensor

from kenotron_cp import Scoring
from kenotron_dist import Axis
from kenotron_models import Build, Context, attention_blocked, attention_flash
from kenotron_models.attention_backends import AttentionBackend, attend
from kenotron_models.block import BlockSpec
from kenotron_models.block_costs import MetaMicroBatch, kept_bytes
from kenotron_models.layers import Attention, AttentionSpec, KVCache

BACKENDS: list[AttentionBackend] = ["blocked", "plain", "auto"]
SIGHTS = [(None, False), (3, False), (None, True), (3, True)]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # of the largest value of each tensor
VARIANTS = [(1.5, False), (None, True), (0.8, True)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a short row, and several steps over the heads."""
    monkeypatch.setattr(attention_blocked, "ROWS", 4)
    monkeypatch.setattr(attention_blocked, "QUERIES", (2, 4))
    monkeypatch.setattr(attention_blocked, "SCORES", 64)


def formula(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor, scale: float,
    cap: float | None,
) -> Tensor:  # fmt: skip
    """Attention head by head in fp64: output * exp(lse) / (exp(lse) + exp(sink))."""
    ratio, heads = q.shape[2] // k.shape[2], []
    for head in range(q.shape[2]):
        scores = scale * q[:, :, head].double() @ k[:, :, head // ratio].double().mT
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1) @ v[:, :, head // ratio].double()
        if sinks is not None:
            total = scores.exp().sum(-1, keepdim=True)
            out = out * total / (total + sinks[head].double().exp())
        heads.append(out)
    return torch.stack(heads, 2)


def tensors_of(heads: int, kv_heads: int, sinks: bool, sequence: int = 15) -> list[Tensor]:
    found = inputs(3, sequence, heads, kv_heads)
    return [*found, torch.linspace(-1, 2, heads)] if sinks else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("window", "documents"), SIGHTS)
@pytest.mark.parametrize(("cap", "sinks"), VARIANTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_back_end_computes_the_formula(
    backend: AttentionBackend,
    cap: float | None,
    sinks: bool,
    window: int | None,
    documents: bool,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> None:
    tensors = [x.to(dtype) for x in tensors_of(heads, kv_heads, sinks)]
    mask, sight = seen(positions(15), window, documents), sight_of(positions(15), window, documents)

    def exact(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None) -> Tensor:
        return formula(q, k, v, s, mask, 0.7, cap)

    def ours(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None) -> Tensor:
        return attend(q, k, v, sight, Scoring(0.7, cap, s), backend)

    want = with_gradients(exact, tensors, torch.float64)
    got = with_gradients(ours, tensors, dtype)
    for name, a, b in zip(("out", "q", "k", "v", "sinks"), got, want, strict=False):
        assert deviation(a, b) <= BOUNDS[dtype], name
    assert len(got) == 4 + sinks


@pytest.mark.parametrize(("cap", "sinks"), VARIANTS)
def test_the_blocked_gradient_is_the_derivative(cap: float | None, sinks: bool) -> None:
    tensors = [x.double().requires_grad_() for x in inputs(2, 7, 4, 2, width=2)]
    more = [torch.linspace(-1, 1, 4).double().requires_grad_()] if sinks else []
    sight = sight_of(positions(7)[:2], 3, True)

    def blocks(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None) -> Tensor:
        return attention_blocked.attend_blocks(q, k, v, sight, Scoring(0.6, cap, s))

    assert torch.autograd.gradcheck(blocks, [*tensors, *more], fast_mode=False)


@pytest.mark.parametrize(
    ("backend", "spec", "said"),
    [
        ("sdpa", {"cap": 1.0}, "attention back end sdpa has no cap: choose auto or flash_attn or"),
        (
            "varlen",
            {"cap": 1.0},
            "end varlen has no cap: choose auto or flash_attn or blocked or ",
        ),
        ("sdpa", {"sinks": True}, "sdpa has no sinks: choose auto or blocked or plain"),
        ("flash_attn", {"sinks": True}, "flash_attn has no sinks: choose auto or blocked or plain"),
    ],
)
def test_an_ordered_back_end_without_it_is_refused(
    backend: AttentionBackend, spec: dict[str, object], said: str
) -> None:
    made = AttentionSpec(heads=4, kv_heads=2, head_dim=8, backend=backend, **spec)
    with pytest.raises(ValueError, match=said):
        made.build(16, Build(Axis.solo("tp")))


def test_flash_attn_caps_scores_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def stand_in(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        given.update(how)
        return q

    module = SimpleNamespace(flash_attn_func=stand_in)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(attention_flash, "installed", lambda: True)
    monkeypatch.setattr(attention_flash, "problem", lambda _: None)
    tensors, sight = inputs(1, 4, 2, 2), sight_of(torch.arange(4)[None])
    attend(*tensors, sight, Scoring(1.0, 2.5))  # auto, on a device that can run it
    assert given["softcap"] == 2.5
    given.clear()
    attend(*tensors, sight, Scoring(1.0, 2.5, torch.zeros(2)))
    assert not given  # blocks have sinks


ALL = AttentionSpec(
    heads=4, kv_heads=2, head_dim=8, cap=1.5, sinks=True, gate=True, window=6, qkv_bias=True
)


def layer(spec: AttentionSpec) -> Attention:
    torch.manual_seed(3)
    made = spec.build(16, Build(Axis.solo("tp"), device="cpu"))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


@pytest.mark.parametrize(
    "spec", [ALL, replace(ALL, sinks=False), replace(ALL, cap=None, gate=False)], ids=str
)
@torch.inference_mode()
def test_what_a_cache_keeps_changes_nothing(spec: AttentionSpec) -> None:
    made, x = layer(spec), torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    places = torch.arange(9).expand(2, 9)
    want = made(x.flatten(0, 1), Context(places)).view(2, 9, 16)
    cache, found = KVCache(9), []
    for first, last in ((0, 4), (4, 5), (5, 8), (8, 9)):
        cache.begin(last, equal_lengths=True)
        context = Context(places[:, first:last], cache=cache)
        found.append(made(x[:, first:last].flatten(0, 1), context).view(2, -1, 16))
    torch.testing.assert_close(torch.cat(found, 1), want)


def test_a_gate_multiplies_what_each_head_mixes() -> None:
    spec = AttentionSpec(heads=2, kv_heads=1, head_dim=4, gate=True)
    gated, plain = layer(spec), layer(replace(spec, gate=False))
    rows = gated.qkv.weight.unflatten(0, (-1, 4))  # q0 g0 q1 g1 k v
    with torch.no_grad():
        plain.qkv.weight.copy_(rows[[0, 2, 4, 5]].flatten(0, 1))
        plain.out.weight.copy_(torch.eye(16)[:, :8])
        gated.out.weight.copy_(torch.eye(16)[:, :8])
    x, context = torch.randn(5, 16), Context(torch.arange(5)[None])
    gates = (x @ rows[[1, 3]].flatten(0, 1).T).sigmoid()
    torch.testing.assert_close(gated(x, context)[:, :8], plain(x, context)[:, :8] * gates)


def test_memory_of_a_layer_with_a_cap_is_that_of_a_kernel() -> None:
    block = BlockSpec(mixer=replace(ALL, gate=False), feed_forward=None)
    usual = BlockSpec(mixer=replace(ALL, gate=False, cap=None, sinks=False), feed_forward=None)
    assert kept_bytes(block, 16, MetaMicroBatch(2, 64)) == kept_bytes(
        usual, 16, MetaMicroBatch(2, 64)
    )
