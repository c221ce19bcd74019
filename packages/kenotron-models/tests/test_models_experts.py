"""Experts: exact oracles, the gradients of one process on every layout, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from decoder_gradients import complete, gradients
from torch import Tensor
from torch.nn import functional as F

from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks
from kenotron_ep import DispatchWay, ExchangeSize, exchange_traffic
from kenotron_models import Build, Context
from kenotron_models.layers import (
    MLP,
    Experts,
    ExpertsSpec,
    MLPSpec,
    Router,
    RouterSpec,
    StackedLinear,
    choose,
)
from kenotron_models.routed_tokens import routed_rows
from kenotron_models.router_jitter import jitter_factors
from kenotron_models.router_losses import balance, load_sums, over_ranks, router_loss
from kenotron_models.stacked_linear import outer_products, stacked_product

ALONE = Build(Axis.solo("tp"), device=None)
WIDTH, FEATURES = 10, 14


def experts(**router: Any) -> Experts:
    torch.manual_seed(3)
    spec = RouterSpec(**{"experts": 6, "top_k": 2, **router})
    return Experts(ExpertsSpec(router=spec, features=FEATURES), WIDTH, ALONE)


def context(batch: int = 2, sequence: int = 9, **more: Any) -> Context:
    return Context(torch.arange(sequence).expand(batch, -1), **more)


def tokens(batch: int = 2, sequence: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch * sequence, WIDTH, generator=generator, requires_grad=True)


def by_loop(layer: Experts, x: Tensor) -> Tensor:
    """Every token through each of its experts, one at a time."""
    choice = layer.router(x)
    first, down = layer.first.weight, layer.down.weight
    rows = []
    for token, chosen, weights in zip(x, choice.experts_TK, choice.weights_TK, strict=True):
        out = torch.zeros(WIDTH)
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            gate, up = (first[e] @ token).chunk(2)
            out = out + weight * (down[e] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "router",
    [
        {}, {"normalize": True, "top_k": 3}, {"scoring": "sigmoid", "scale": 2.5},
        {"groups": 3, "top_groups": 2, "scoring": "sigmoid", "normalize": True}, {"top_k": 6},
    ],
    ids=str,
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(router: dict[str, Any]) -> None:
    layer, x = experts(**router), tokens()
    ours = layer(x, context())
    grad = torch.randn_like(ours)
    wanted = by_loop(layer, x)
    torch.testing.assert_close(ours, wanted)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(ours, inputs, grad)
    for got, want in zip(found, torch.autograd.grad(wanted, inputs, grad), strict=True):
        torch.testing.assert_close(got, want)


def test_equal_experts_are_one_dense_layer() -> None:
    layer, x = experts(normalize=True), tokens()
    dense = MLP(MLPSpec(features=FEATURES), WIDTH, ALONE)
    with torch.no_grad():
        dense.first.weight.copy_(layer.first.weight[0])
        dense.down.weight.copy_(layer.down.weight[0])
        for stack in (layer.first, layer.down):
            stack.weight.copy_(stack.weight[:1].expand_as(stack.weight))
    torch.testing.assert_close(layer(x, context()), dense(x))


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    scores = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.2, 0.2, 0.2, 0.2]])
    spec = RouterSpec(experts=4, top_k=2)
    assert choose(scores, spec).tolist() == [[1, 2], [0, 1]]
    grouped = RouterSpec(experts=4, top_k=2, groups=2, top_groups=1)
    assert choose(scores, grouped).tolist() == [[2, 3], [0, 1]]


def test_a_router_of_a_bfloat16_model_has_fp32_scores() -> None:
    build = Build(Axis.solo("tp"), device=None, dtype=torch.bfloat16)
    router = Router(RouterSpec(experts=6, top_k=2, choice_bias=True), WIDTH, build)
    x = tokens().detach().bfloat16()
    choice = router(x)
    exact = (x.double() @ router.weight.double().t()).softmax(-1)
    assert choice.scores_TE.dtype == choice.weights_TK.dtype == torch.float32
    assert (choice.scores_TE - exact).abs().max() < 1e-6
    assert router.choice_bias is not None and router.choice_bias.dtype == torch.float32


def test_padding_is_sent_to_no_expert_and_counts_in_no_loss() -> None:
    layer, x = experts(balance_loss=0.5, z_loss=0.1), tokens()
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = padding[1, 8:] = True
    out = layer(x, context(padding_BS=padding))
    assert not out[padding.flatten()].any() and out[~padding.flatten()].any()
    assert losses(layer, x, padding_BS=padding) == pytest.approx(
        sum(losses(layer, x[9 * i :][:n], 1, n) for i, n in ((0, 6), (1, 8)))
    )


def losses(layer: Experts, x: Tensor, batch: int = 2, sequence: int = 9, **more: Any) -> float:
    """The router's loss, not divided."""
    rows = routed_rows(context(batch, sequence, **more), batch * sequence, ALONE.tp)
    if rows is None:
        rows = torch.arange(batch * sequence) // sequence
    spec = layer.spec.router
    return router_loss([layer.router(x)], spec, [rows], batch, over_ranks([ALONE.tp]))[0].item()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_an_even_load_has_a_balance_loss_of_one_a_token(scoring: str) -> None:
    layer = experts(top_k=6, scoring=scoring)
    rows = torch.arange(18) // 9
    spec = layer.spec.router
    loss = balance(load_sums([layer.router(tokens())], spec, [rows], 2, over_ranks()), spec)
    assert loss.item() == pytest.approx(18)


@pytest.mark.parametrize("kind", ["sample", "micro_batch", "all_layers"])
def test_losses_have_the_gradients_of_finite_differences(kind: str) -> None:
    layer = experts(balance_loss=0.7, z_loss=0.2, balance=kind).double()
    x, rows = tokens().detach().double(), torch.arange(18) // 9
    weight = layer.router.weight
    spec = layer.spec.router
    chosen = layer.router(x).experts_TK

    def loss() -> Tensor:
        return router_loss([layer.router(x, chosen)], spec, [rows], 2, over_ranks())[0]

    (gradient,) = torch.autograd.grad(loss(), weight)
    for place in ((0, 0), (3, 5), (5, 9)):
        with torch.no_grad():
            values = []
            for step in (1e-6, -2e-6):
                weight[place] += step
                values.append(loss().item())
            weight[place] += 1e-6
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(gradient[place].item(), rel=1e-6)


def test_a_layer_computed_again_keeps_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, places = experts(), tokens(), context()
    layer.computed_again = True
    want = torch.autograd.grad(layer(x, places).sum(), [x, *layer.parameters()])
    out = torch.utils.checkpoint.checkpoint(layer, x, places, use_reentrant=False)
    monkeypatch.setattr("kenotron_models.router.choose", lambda scores, spec: choose(-scores, spec))
    got = torch.autograd.grad(out.sum(), [x, *layer.parameters()])
    assert all(map(torch.equal, got, want))


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    layer, x = experts(top_k=1), tokens()
    with torch.no_grad():
        layer.router.weight.zero_()  # all scores are equal: expert 0 has every token
    layer(x, context()).sum().backward()
    for stack in (layer.first, layer.down):
        assert stack.weight.grad is not None
        assert stack.weight.grad[0].any() and not stack.weight.grad[1:].any()


def test_noise_on_the_router_leaves_what_experts_read_alone() -> None:
    layer, plain, x = experts(jitter=0.3, top_k=6), experts(top_k=6), tokens()
    places = context(samples_B=torch.tensor([4, 9]), dropout_key=11)
    factors = jitter_factors(x, 0.3, places, "layers.0.router", ALONE.tp)
    assert factors is not None and 0.7 < factors.min() < 0.71 and 1.29 < factors.max() < 1.3
    noisy, exact = layer.router(x, noise=factors), layer.router(x * factors)
    assert torch.equal(noisy.logits_TE, exact.logits_TE)
    changed = layer(x, places)
    assert not torch.allclose(changed, plain(x, places), rtol=1e-3)
    assert torch.equal(layer(x, context()), plain(x, context()))  # an evaluation has no key
    every = torch.stack(
        [F.linear(F.silu(gate) * up, down) for gate, up, down in by_expert(layer, x)]
    )
    torch.testing.assert_close(changed, (noisy.scores_TE.t()[..., None] * every).sum(0))


def by_expert(layer: Experts, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gate and up of all tokens, and the matrix down, of each expert."""
    pairs = zip(layer.first.weight, layer.down.weight, strict=True)
    return [(*F.linear(x, first).chunk(2, -1), down) for first, down in pairs]


def test_a_layer_computed_again_has_the_same_noise() -> None:
    layer, x = experts(jitter=0.3), tokens()
    places = context(samples_B=torch.tensor([4, 9]), dropout_key=11)
    want = torch.autograd.grad(layer(x, places).sum(), [x, *layer.parameters()])
    layer.computed_again = True
    out = torch.utils.checkpoint.checkpoint(layer, x, places, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, *layer.parameters()]), want))


@cache
def on_one(name: str) -> tuple[float, dict[str, Tensor]]:
    ranks = on_ranks(gradients, name, "plain")
    return ranks[0][0], complete(ranks)


CASES = [
    ("experts", "plain", "none", {"tp": 2}),
    ("experts", "plain", "none", {"tp": 2, "ep": 2}),
    ("experts", "sequence", "selective", {"tp": 2, "ep": 2}),
    ("experts", "plain", "full", {"cp": 2, "ep": 2}),
    ("experts", "sequence", "full", {"cp": 2, "tp": 2, "ep": 4}),
    ("experts", "plain", "selective", {"cp": 2, "tp": 2, "ep": 2}),
    ("gpt-oss", "sequence", "selective", {"cp": 2, "tp": 2, "ep": 4}),
    ("sigmoid", "sequence", "none", {"tp": 4, "ep": 2}),
    ("sigmoid", "plain", "none", {"cp": 4, "ep": 4}),
    ("sigmoid", "plain", "full", {"tp": 4, "ep": 4}),
]


@pytest.mark.parametrize(("name", "mode", "again", "axes"), CASES, ids=str)
def test_every_gradient_is_that_of_one_process(
    name: str, mode: str, again: str, axes: dict[str, int]
) -> None:
    loss, want = on_one(name)
    ranks = on_ranks(gradients, name, mode, "ring", again, **axes)
    assert all(rank[0] == pytest.approx(loss, rel=1e-5) for rank in ranks)
    got = complete(ranks)
    assert set(got) == set(want)
    for path, tensor in want.items():
        assert (got[path] - tensor).abs().max() / tensor.abs().max() < 2e-5, path


@pytest.mark.parametrize("mode", ["plain", "sequence"])
def test_chunks_over_ep_change_no_result(mode: str) -> None:
    (loss, _, _), *_ = on_ranks(gradients, "experts", mode, tp=2, ep=2)
    chunked = on_ranks(gradients, "experts", mode, "ring", "selective", False, 3, tp=2, ep=2)
    assert chunked[0][0] == loss
    found = complete(chunked)
    _, want = on_one("experts")
    for path, tensor in want.items():
        assert (found[path] - tensor).abs().max() / tensor.abs().max() < 2e-5, path


def test_compiled_layers_have_the_same_gradients() -> None:
    loss, want = on_one("experts")
    ranks = on_ranks(gradients, "experts", "plain", "ring", "none", True, tp=2, ep=2)
    assert ranks[0][0] == pytest.approx(loss, rel=1e-5)
    for path, tensor in complete(ranks).items():
        assert (tensor - want[path]).abs().max() / want[path].abs().max() < 2e-5, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_grouped_kernel_computes_what_the_loop_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, dy = (torch.randn(20, n, dtype=dtype) for n in (16, 24))
    weight, counts = torch.randn(4, 24, 16, dtype=dtype), torch.tensor([5, 0, 9, 6])

    def products() -> list[Tensor]:
        back = stacked_product(dy, weight.transpose(1, 2), counts)
        return [stacked_product(x, weight, counts), back, outer_products(dy, x, counts)]

    plain = products()
    monkeypatch.setattr("kenotron_models.stacked_linear._has_grouped_kernel", lambda x, n: True)
    for ours, wanted in zip(products(), plain, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_auto_gathers_where_that_sends_fewer_bytes(ranks: int) -> None:
    spec = ExpertsSpec(router=RouterSpec(experts=12, top_k=4), features=8, way="auto")
    ways: list[DispatchWay] = ["alltoall", "allgather"]
    size = ExchangeSize(tokens=24, top_k=4, features=16, experts=12)
    sent = [exchange_traffic(size, ranks, way).forward for way in ways]
    assert spec.way_over(ranks) == ways[sent[1] < sent[0]]


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    build = Build(Axis.solo("tp"), ep=Axis("ep", 0, (0, 1, 2, 3)))
    with pytest.raises(ValueError, match="cannot split 6 experts over 4 ep ranks: choose an"):
        StackedLinear(6, 8, 8, build)
