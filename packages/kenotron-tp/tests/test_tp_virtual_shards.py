"""Virtual shards: sums, slices and losses have the same bits on every number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kenotron_dist import Axis, Mesh, tree_sum
from kenotron_dist.testing import on_ranks
from kenotron_tp import OwnChunk, cross_entropy, from_shards, shards_of, to_shards

SHARDS, TOKENS, WIDTH, VOCABULARY, ROWS = 8, 5, 6, 37, 5
"""ROWS of a virtual shard: the last one has padding, and nothing else beside it."""
DTYPES = [torch.float32, torch.bfloat16]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return (values * 10 ** torch.randn(shape, generator=generator)).to(dtype)


def parts(seed: int, axis: Axis, dtype: torch.dtype) -> list[Tensor]:
    """This rank's tensors of all virtual shards'."""
    count = SHARDS // axis.size
    own = range(axis.rank * count, (axis.rank + 1) * count)
    return [draw(seed + i, TOKENS, WIDTH, dtype=dtype) for i in own]


def added(mesh: Mesh, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """A sum of parts, and the gradient of what they all read."""
    axis = mesh["tp"]
    total = from_shards(parts(0, axis, dtype), axis)
    x = torch.ones(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    read = to_shards(x, SHARDS // axis.size, axis)
    torch.autograd.backward(read, parts(100, axis, dtype))
    assert x.grad is not None
    return total.flatten().tolist(), x.grad.flatten().tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_of_one_tree(dtype: torch.dtype) -> None:
    want = tuple(
        tree_sum([each.float() for each in parts(seed, Axis.solo("tp"), dtype)]).to(dtype)
        for seed in (0, 100)
    )
    for ranks in (1, 2, 4, 8):
        for found in on_ranks(added, dtype, tp=ranks):
            assert found == tuple(each.flatten().tolist() for each in want)


def shared(mesh: Mesh) -> list[tuple[list[float], list[float]]]:
    """A weight of two chunks: one cut in all shards, and two heads that shards share."""
    axis = mesh["tp"]
    count = SHARDS // axis.size
    q, kv = draw(1, 16, 3).chunk(axis.size)[axis.rank], draw(2, 4, 3)
    heads = max(2 // axis.size, 1)
    first = axis.rank * 2 // axis.size
    weight = torch.cat([q, kv.view(2, 2, 3)[first : first + heads].flatten(0, 1)])
    weight.requires_grad_()
    chunks = [OwnChunk(len(q)), OwnChunk(2 * heads, heads=2)]
    own = shards_of(weight, 0, chunks, count, axis)
    assert {tuple(each.shape) for each in own} == {(4, 3)}
    grads = [draw(10 + axis.rank * count + i, 4, 3) for i in range(count)]
    torch.autograd.backward(own, grads)
    assert weight.grad is not None
    of_q, of_kv = weight.grad.split([len(q), 2 * heads])
    values = [each.flatten().tolist() for each in own]
    rows = [of_q[2 * i : 2 * i + 2].flatten().tolist() for i in range(count)]
    each = [of_kv[2 * (i * heads // count) :][:2].flatten().tolist() for i in range(count)]
    return list(zip(values, [a + b for a, b in zip(rows, each, strict=True)], strict=True))


def test_shards_share_heads() -> None:
    [want] = on_ranks(shared)
    gradients = [draw(10 + i, 4, 3)[2:] for i in range(SHARDS)]
    for head in range(2):
        total = tree_sum([each.clone() for each in gradients[4 * head : 4 * head + 4]])
        assert want[4 * head][1][6:] == total.flatten().tolist()
    for ranks in (2, 4, 8):
        assert [each for rank in on_ranks(shared, tp=ranks) for each in rank] == want


def lost(mesh: Mesh, dtype: torch.dtype, cap: float | None) -> list[list[float]]:
    """Losses, and gradients of the input and of this rank's rows of the output layer."""
    axis = mesh["tp"]
    x = draw(3, TOKENS, WIDTH, dtype=dtype).requires_grad_()
    whole = draw(4, SHARDS * ROWS, WIDTH, dtype=dtype)
    weight = whole.chunk(axis.size)[axis.rank].clone().requires_grad_()
    labels = torch.tensor([0, 36, -100, 7, 20])
    options = {"weight": weight, "vocab_size": VOCABULARY, "cap": cap, "z_loss": 0.1}
    loss, z = cross_entropy(x, labels, axis, shards=SHARDS, **options)
    (loss * torch.arange(5)).sum().backward()
    total, _ = cross_entropy(x, labels, axis, shards=SHARDS, reduction="sum", times=0.3, **options)
    assert x.grad is not None and weight.grad is not None
    found = [loss, z, total.detach()[None], x.grad.flatten(), weight.grad.flatten()]
    return [each.tolist() for each in found]


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_have_the_bits_of_one_process(dtype: torch.dtype, cap: float | None) -> None:
    [want] = on_ranks(lost, dtype, cap)
    for ranks in (2, 8):
        found = on_ranks(lost, dtype, cap, tp=ranks)
        assert all(each[:4] == want[:4] for each in found)
        assert [value for each in found for value in each[4]] == want[4]


@pytest.mark.parametrize("cap", [None, 3.0])
def test_losses_are_those_of_whole_logits(cap: float | None) -> None:
    axis = Axis.solo("tp")
    x, weight = draw(3, TOKENS, WIDTH), draw(4, SHARDS * ROWS, WIDTH)
    labels = torch.tensor([0, 36, -100, 7, 20])
    found = []
    for shards in (1, SHARDS):
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        loss, z = cross_entropy(
            leaves[0], labels, axis, weight=leaves[1], vocab_size=VOCABULARY, cap=cap, z_loss=0.1,
            shards=shards,
        )  # fmt: skip
        loss.sum().backward()
        found.append([loss.detach(), z, *(each.grad for each in leaves)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
