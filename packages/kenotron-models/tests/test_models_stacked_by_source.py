"""Experts of several sources: the bits that each source has alone, with all experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kenotron_dist import Axis, Mesh
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context
from kenotron_models.layers import Experts, ExpertsSpec, RouterSpec
from kenotron_models.stacked_by_source import each_group, product_by_source

EXPERTS, INPUTS = 6, 10
COUNTS = torch.tensor(
    [[3, 0, 5, 1, 2, 4], [1, 2, 0, 7, 0, 1], [0, 0, 9, 0, 1, 0], [2, 2, 2, 2, 2, 2]]
)
"""Rows of each source and expert."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def computed(
    x: Tensor, grad: Tensor, counts: Tensor, weight: Tensor, transposed: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Results, gradients of rows, and gradients of the weights of each source."""
    x = x.clone().requires_grad_()
    weights = [weight.clone().requires_grad_() for _ in counts]
    y = product_by_source(x, counts, weights, transposed=transposed)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad, [w.grad for w in weights if w.grad is not None]


@pytest.mark.parametrize("outputs", [1, 11, 16])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_a_source_have_the_bits_of_the_source_alone(
    outputs: int, ranks: int, transposed: bool
) -> None:
    weight = drawn(EXPERTS, *((INPUTS, outputs) if transposed else (outputs, INPUTS)), seed=1)
    xs = [drawn(int(n.sum()), INPUTS, seed=2 + i) for i, n in enumerate(COUNTS)]
    grads = [drawn(len(x), outputs, seed=9 + i) for i, x in enumerate(xs)]
    alone = [
        computed(x, grad, n[None], weight, transposed)
        for x, grad, n in zip(xs, grads, COUNTS, strict=True)
    ]
    each = EXPERTS // ranks
    for rank in range(ranks):
        own = slice(rank * each, (rank + 1) * each)

        def part(rows: Tensor, source: int, own: slice = own) -> Tensor:
            sizes = COUNTS[source].tolist()
            return torch.cat(rows.split(sizes)[own])

        mine = [torch.cat([part(x, i) for i, x in enumerate(of)]) for of in (xs, grads)]
        y, dx, dw = computed(*mine, COUNTS[:, own], weight[own].clone(), transposed)
        assert torch.equal(y, torch.cat([part(a[0], i) for i, a in enumerate(alone)]))
        assert torch.equal(dx, torch.cat([part(a[1], i) for i, a in enumerate(alone)]))
        assert all(torch.equal(w, a[2][0][own]) for w, a in zip(dw, alone, strict=True))


def test_it_is_a_product_with_the_matrix_of_each_row() -> None:
    x, weight = drawn(int(COUNTS.sum()), INPUTS, seed=1), drawn(EXPERTS, 7, INPUTS, seed=2)
    experts = torch.arange(EXPERTS).repeat(len(COUNTS)).repeat_interleave(COUNTS.flatten())
    want = torch.einsum("ri,roi->ro", x, weight[experts])
    found = product_by_source(x, COUNTS, [weight] * len(COUNTS))
    torch.testing.assert_close(found, want)


def test_the_last_elements_of_a_group_are_rounded_as_alone() -> None:
    y, sizes = drawn(int(COUNTS.sum()), 3, seed=1) * 9, COUNTS.flatten().tolist()
    found = each_group(F.silu, y, COUNTS)
    assert torch.equal(found, torch.cat([F.silu(rows.clone()) for rows in y.split(sizes)]))


def layer_of(ep: Axis, gated: bool) -> Experts:
    build = Build(Axis.solo("tp"), device=None, ep=ep, ep_chunks=2, by_source=True)
    spec = ExpertsSpec(
        router=RouterSpec(experts=EXPERTS, top_k=2), features=15, gated=gated, bias=True,
        activation="silu" if gated else "gelu_tanh", way="allgather",
    )  # fmt: skip
    layer = Experts(spec, INPUTS, build)
    for i, parameter in enumerate(layer.parameters()):
        whole = parameter.shape[0] * ep.size if parameter.ndim > 2 or i > 1 else None
        values = drawn(whole or len(parameter), *parameter.shape[1:], seed=40 + i)
        own = values if whole is None else values.chunk(ep.size)[ep.rank]
        parameter.data.copy_(own)
    return layer


def through(mesh: Mesh, gated: bool) -> list[tuple[list[float], list[float]]]:
    """Output and gradient of the input of this rank's tokens, over ep and by this rank alone."""
    found, context = [], Context(torch.arange(29)[None])
    for ep in (mesh["ep"], Axis.solo("ep")):
        x = drawn(29, INPUTS, seed=7 + mesh.rank).requires_grad_()
        y = layer_of(ep, gated)(x, context)
        y.backward(drawn(29, INPUTS, seed=70 + mesh.rank))
        assert x.grad is not None
        found.append((y.flatten().tolist(), x.grad.flatten().tolist()))
    return found


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ep", [2, 3])
def test_a_layer_has_the_bits_of_each_rank_alone(ep: int, gated: bool) -> None:
    for together, alone in on_ranks(through, gated, dp=ep, ep=ep):
        assert together == alone
