"""A small decoder cut over tp trains as the whole one does: losses, gradients by name, weights."""

import functools
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from tp_ranks import check_parameters, whole_gradients

from kenotron_dist import Axis, WeightQueue, deferring
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import Chunk, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    cross_entropy,
    join_tokens,
    mark_partial,
    split_tokens,
    vocabulary_chunk,
)

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, INNER = 53, 16, 8, 2, 4, 24
BATCH, LENGTH, STEPS = 3, 7, 4  # 21 tokens: no number of ranks divides them
MODES = {
    "whole": {},
    "overlap": {"overlap": True},
    "cut": {"sequence_parallel": True},
    "cut, all": {"sequence_parallel": True, "overlap": True, "regather": True},
}


class Layer(nn.Module):
    """Attention with fewer kv heads than ranks, a gated feed-forward, two norms with biases."""

    def __init__(self, axis, **mode):
        super().__init__()
        row_mode = {name: value for name, value in mode.items() if name != "regather"}
        queries, kv = HEADS * HEAD, KV_HEADS * HEAD
        parts = Chunk(kv, parts=KV_HEADS)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = ColumnParallelLinear(
            WIDTH,
            queries + 2 * kv,
            axis,
            bias=True,
            chunks=(Chunk(queries), parts, parts),
            **mode,
        )
        self.out = RowParallelLinear(queries, WIDTH, axis, bias=True, **row_mode)
        self.gate_up = ColumnParallelLinear(
            WIDTH, 2 * INNER, axis, chunks=(Chunk(INNER), Chunk(INNER)), **mode
        )
        self.down = RowParallelLinear(INNER, WIDTH, axis, bias=True, **row_mode)
        if mode.get("sequence_parallel"):
            mark_partial(self.norm1, axis)
            mark_partial(self.norm2, axis)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x), tokens=BATCH * LENGTH).view(BATCH, LENGTH, -1, HEAD)
        heads = self.out.weight.shape[1] // HEAD
        q, k, v = qkv.transpose(1, 2).split([heads, *2 * [(qkv.shape[2] - heads) // 2]], 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH * LENGTH, -1))
        gate, up = self.gate_up(self.norm2(x), tokens=BATCH * LENGTH).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, axis, **mode):
        super().__init__()
        self.axis, self.sequence = axis, mode.get("sequence_parallel", False)
        self.embedding = VocabParallelEmbedding(
            VOCAB, WIDTH, axis, padding_idx=3, sequence_parallel=self.sequence
        )
        self.layers = nn.ModuleList(Layer(axis, **mode) for _ in range(2))
        chunks = (vocabulary_chunk(VOCAB, axis.size),)
        self.head = ColumnParallelLinear(WIDTH, VOCAB, axis, chunks=chunks, **mode)

    def forward(self, tokens):
        x = self.embedding(tokens.flatten())
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, tokens, labels, fused):
        x, labels = self(tokens), labels.flatten()
        if fused:
            options = {"vocab_size": VOCAB, "chunk": 5, "sequence_parallel": self.sequence}
            each = cross_entropy(x, labels, self.axis, weight=self.head.weight, **options)[0]
        else:
            logits = self.head(x, tokens=len(labels))
            each = cross_entropy(logits, labels, self.axis, vocab_size=VOCAB)[0]
        return each.sum() / (labels != -100).sum()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator, device="cpu")
    tokens = tokens.to(torch.get_default_device())
    labels = tokens[:, 1:].clone()
    labels[0, :2] = -100
    return tokens[:, :-1], labels


def begin(axis, mode):
    torch.manual_seed(0)
    return Model(axis, **mode)


def run(mesh, mode, fused, compiled=None):
    """Train the cut model beside the whole one; its losses and final weights."""
    torch.use_deterministic_algorithms(True)
    model, whole = begin(mesh["tp"], mode), begin(Axis.solo("tp"), {})
    if compiled:
        for layer in model.layers:
            layer.compile(backend=compiled)
    losses = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        loss = model.loss(tokens, labels, fused)
        expected = F.cross_entropy(whole.head(whole(tokens)), labels.flatten())
        assert_close(loss, expected, rtol=1e-5, atol=0)
        loss.backward()
        expected.backward()
        check_parameters(model, whole, mesh, assert_close)
        grads, layouts = whole_gradients(model, mesh)
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter -= 0.1 * parameter.grad
                cut = model.get_parameter(name)  # steps in fp32 from the same weights
                cut -= 0.1 * grads[name]
                assert_close(cut, scatter(parameter, layouts[name], mesh.view(layouts[name])))
                cut.copy_(scatter(parameter, layouts[name], mesh.view(layouts[name])))
        model.zero_grad()
        whole.zero_grad()
        losses.append(loss.detach())
    return losses, grads


def check_modes(mesh):
    for i, mode in enumerate(MODES.values()):
        losses, grads = run(mesh, mode, fused=i % 2 == 1)
    again, same = run(mesh, mode, fused=True)  # the last one once more
    assert torch.equal(torch.stack(losses), torch.stack(again))
    assert all(torch.equal(grads[name], same[name]) for name in grads)


@pytest.mark.smoke
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_cut_decoder_trains_as_the_whole_one(tp):
    on_ranks(check_modes, tp=tp, seconds=120)


slow = pytest.mark.gloo(reason="g++ takes a minute; aot_eager makes the same calls")


@pytest.mark.parametrize(
    ("mode", "backend"),
    [("overlap", "aot_eager"), pytest.param("cut, all", "inductor", marks=slow)],
)
@pytest.mark.by_turns(1)
def test_compiled_layers_give_the_same(mode, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    on_ranks(run, MODES[mode], False, backend, tp=2, seconds=240)


def infer(mesh):
    """Whole tokens through layers that were built for cut ones: the same weights and logits."""
    axis = mesh["tp"]
    torch.manual_seed(1)
    options = {"sequence_parallel": True, "overlap": True}
    embedding = VocabParallelEmbedding(VOCAB, WIDTH, axis, sequence_parallel=True)
    column = ColumnParallelLinear(WIDTH, 24, axis, bias=True, **options)
    row = RowParallelLinear(24, WIDTH, axis, bias=True, **options)
    tokens = torch.arange(9) * 5 % VOCAB
    cut = row(column(embedding(tokens), tokens=9))
    joined = join_tokens(cut, axis, 9).detach()
    with torch.no_grad():
        whole = {"sequence_parallel": False}
        x = row(column(embedding(tokens, **whole), **whole), **whole)
    assert_close(x, joined)
    assert x.shape == (9, WIDTH)
    for layer, given in ((embedding, tokens), (column, x), (row, column(cut, tokens=9))):
        with pytest.raises(ValueError, match="sequence_parallel=False in forward, but the layer"):
            layer(given, **whole)
    return x


def test_inference_takes_whole_tokens_through_the_same_layers():
    one = on_ranks(infer, tp=1)[0]
    for tp in (2, 4):
        for found in on_ranks(infer, tp=tp):
            assert_close(found, one)


def defer(mesh, mode):
    """Weight gradients that are put off: none in backward, then the same bits."""
    model = begin(mesh["tp"], mode)
    tokens, labels = batch(0)
    model.loss(tokens, labels, fused=False).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    queue = WeightQueue()
    layers = list(deferring(model))
    assert len(layers) == 9
    for layer in layers:
        layer.weight_queue = queue
    model.loss(tokens, labels, fused=False).backward()
    deferred = queue.take()
    assert len(deferred) == 9 and all(layer.weight.grad is None for layer in layers)
    deferred.run()
    for name, parameter in model.named_parameters():
        # With overlap the product is cut in two to hide a sum; put off, it is one.
        close = (
            assert_close if mode.get("overlap") else functools.partial(assert_close, rtol=0, atol=0)
        )
        close(parameter.grad, expected[name])


@pytest.mark.parametrize("mode", list(MODES))
def test_weight_gradients_can_be_put_off(mode):
    for tp in (1, 2):
        on_ranks(defer, MODES[mode], tp=tp)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_putting_gradients_off_changes_no_bit_of_a_bf16_layer_with_a_bias(kind):
    torch.manual_seed(0)
    layer = kind(64, 48, Axis.solo("tp"), bias=True, dtype=torch.bfloat16)
    x = torch.randn(80, 64, dtype=torch.bfloat16)
    plain = layer(x)
    layer.weight_queue = WeightQueue()
    assert torch.equal(layer(x), plain)


def enter_and_leave(mesh):
    """Tokens are split, go through a whole layer, and are joined: as if nothing was cut."""
    axis = mesh["tp"]
    torch.manual_seed(0)
    norm, whole = nn.LayerNorm(4), nn.LayerNorm(4)
    mark_partial(norm, axis)
    x = torch.randn(5, 4)
    own, weight = x.clone().requires_grad_(), torch.randn(5, 4)
    y = join_tokens(norm(split_tokens(own, axis)), axis, 5)
    (y * weight).sum().backward()
    twin = x.clone().requires_grad_()
    (whole(twin) * weight).sum().backward()
    assert_close(y, whole(x))
    assert_close(own.grad, twin.grad)
    check_parameters(norm, whole, mesh, assert_close)
    assert len(parameter_layouts(norm, mesh.sizes)["weight"].partial_axes) == 1
    rows = split_tokens(x, axis)
    if axis.size > 1:
        words = f"12 tokens over {axis.size} tp ranks are .* rows a rank, but this one has"
        with pytest.raises(ValueError, match=words):
            join_tokens(rows, axis, 12)


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_tokens_are_split_and_joined(tp):
    on_ranks(enter_and_leave, tp=tp)
