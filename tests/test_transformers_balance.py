"""The balance loss of all layers is the one of Hugging Face's transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from kenotron_dist import Axis
from kenotron_models import Build, Experts, ExpertsSpec, RouterSpec
from kenotron_models.router_losses import LoadSums, balance, load_sums

LAYERS, TOKENS, WIDTH, EXPERTS, TOP_K = 3, 20, 8, 6, 2


def test_value_and_gradient_are_theirs() -> None:
    torch.manual_seed(2)
    spec = RouterSpec(
        experts=EXPERTS, top_k=TOP_K, layers=LAYERS, balance_loss=1.0, balance="all_layers"
    )
    build = Build(Axis.solo("tp"), device=None)
    routers = [
        Experts(ExpertsSpec(router=spec, features=4), WIDTH, build).router for _ in range(LAYERS)
    ]
    inputs = torch.randn(LAYERS, TOKENS, WIDTH)
    weights = [router.weight for router in routers]
    logits = tuple(x @ weight.t() for x, weight in zip(inputs, weights, strict=True))
    theirs = load_balancing_loss_func(logits, EXPERTS, TOP_K)
    assert isinstance(theirs, torch.Tensor)
    ours, earlier = torch.zeros(()), list[LoadSums]()
    rows = torch.zeros(TOKENS, dtype=torch.int64)
    for router, x in zip(routers, inputs, strict=True):
        sums = load_sums(router(x), spec, rows, 1, [])
        ours = ours + balance(sums, spec, earlier) / TOKENS
        earlier.append(sums)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    wanted = torch.autograd.grad(theirs, weights)
    for found, want in zip(torch.autograd.grad(ours, weights), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)
