"""The balance loss of all layers is the one of Hugging Face's transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from kenotron_dist import Axis
from kenotron_models import Build, Context
from kenotron_models.layers import Experts, ExpertsSpec, RouterSpec

LAYERS, TOKENS, WIDTH, EXPERTS, TOP_K = 3, 20, 8, 6, 2


class Losses(list[Tensor]):
    """Losses that layers add."""

    def add(self, scalar: Tensor) -> None:
        self.append(scalar)


def test_its_gradient_is_theirs() -> None:
    torch.manual_seed(2)
    router = RouterSpec(
        experts=EXPERTS, top_k=TOP_K, layers=LAYERS, balance_loss=1.0, balance="all_layers"
    )
    build, losses = Build(Axis.solo("tp"), device="cpu"), Losses()
    places = torch.arange(TOKENS)[None]
    context = Context(places, loss_weight=torch.tensor(1 / TOKENS))
    inputs, layers = torch.randn(LAYERS, TOKENS, WIDTH), []
    for number, x in enumerate(inputs):
        layer = Experts(ExpertsSpec(router=router, features=4), WIDTH, build, layer=number)
        layer.auxiliary_losses = losses
        layer(x, context)
        layers.append(layer)
    weights = [layer.router.weight for layer in layers]
    logits = tuple(x @ weight.t() for x, weight in zip(inputs, weights, strict=True))
    theirs = load_balancing_loss_func(logits, EXPERTS, TOP_K)
    assert isinstance(theirs, Tensor)
    wanted = torch.autograd.grad(theirs, weights)
    for found, want in zip(torch.autograd.grad(sum(losses), weights), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)
