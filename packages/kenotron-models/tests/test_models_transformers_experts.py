"""Experts of transformers that are called with all tokens for each expert."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Mesh
from kenotron_dist.testing import on_ranks
from kenotron_models.build import Build
from kenotron_models.transformers_experts import exchange_experts
from kenotron_tp import TPMode

EXPERTS, TOKENS, WIDTH = 4, 6, 8
CHOSEN = torch.tensor([[1, 0], [3, 1], [1, 3], [0, 1], [3, 1], [1, 0]])
"""Expert 2 has no token."""


class Experts(nn.Module):
    """Experts as Llama-4 has them: rows (E * T, D)."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        draw = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5, generator=draw))
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH, generator=draw))
        if bias:
            self.bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the results of all rows."""
        x = hidden_states.view(len(self.up), -1, WIDTH)
        return torch.bmm(torch.bmm(x, self.up).relu(), self.down).view(-1, WIDTH)


class Layer(nn.Module):
    """A layer that gives its experts the tokens times their weights."""

    def __init__(self, bias: bool = False, top_k: int | None = 2) -> None:
        super().__init__()
        self.experts, self.top_k = Experts(bias), top_k

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of the results of a token's experts."""
        weights = torch.zeros(len(x), EXPERTS).scatter(1, chosen, 1.5)
        rows = (x * weights.t()[..., None]).flatten(0, 1)
        return self.experts(rows).unflatten(0, (EXPERTS, -1)).sum(0)


def tokens() -> Tensor:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    x[2] = 0.0  # a token without features
    return x.requires_grad_()


def over_ranks(mesh: Mesh, chunks: int) -> list[Tensor]:
    """Result and gradients of this rank's experts and tokens."""
    layer, ep = Layer(), mesh["ep"]
    build = Build(mesh["tp"], TPMode(), ep=ep, ep_chunks=chunks)
    exchange_experts(layer, {}, build)
    x, chosen = (each.chunk(2)[ep.rank] for each in (tokens().detach(), CHOSEN))
    y = layer(x.requires_grad_(), chosen)
    y.square().sum().backward()
    return [y.detach(), x.grad, layer.experts.up.grad, layer.experts.down.grad]


@pytest.mark.parametrize("chunks", [1, 2])
def test_experts_of_all_tokens_are_those_of_one_process(chunks: int) -> None:
    layer, x = Layer(), tokens()
    (y := layer(x, CHOSEN)).square().sum().backward()
    due = [y.detach(), x.grad, layer.experts.up.grad, layer.experts.down.grad]
    ranks = on_ranks(partial(over_ranks, chunks=chunks), dp=2, ep=2)
    for expected, *found in zip(due, *ranks, strict=True):
        torch.testing.assert_close(torch.cat(found), expected)


@pytest.mark.parametrize("changes", [{"bias": True}, {"top_k": None}])
def test_experts_that_are_called_in_another_way_are_named(changes: dict) -> None:
    build = Build(Axis.solo("tp"), TPMode(), ep=Axis("ep", 0, (0, 1)))
    words = "experts: a Experts is called with hidden_states: its experts cannot be cut over ep"
    with pytest.raises(ValueError, match=words):
        exchange_experts(Layer(**changes), {}, build)
