"""Contexts are given back as soon as a rank has done its last action of a micro-batch, not before:
what is computed again, and products of weights that come later, still read them."""

from __future__ import annotations

import pytest
import torch
from pp_models import pipeline_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_pp import gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_v

SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved(2),
    "zero bubble": zero_bubble_h1,
    "zero bubble, two chunks": zero_bubble_v,
}
MICROBATCHES, LAYERS, WIDTH = 6, 4, 5


class Recomputed(nn.Module):
    """A layer whose backward reads the context once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.over: list[int] = []
        self.seen = 0

    def forward(self, x: Tensor, context: dict[str, Tensor]) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x)) * context["factor"]

        self.seen = max(self.seen, len(self.over))
        y: Tensor = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)
        return y


def measure(mesh: Mesh, name: str, gives_back: bool) -> tuple[list[int], int, list[list[float]]]:
    """What was given back, how much of it before the last forward, and all gradients."""
    torch.manual_seed(0)
    layers = [Recomputed() for _ in range(LAYERS)]
    pipeline, found = pipeline_of(layers, mesh["pp"], SCHEDULES[name], mesh.pairs("pp"))
    own = [layer for layer in found.values() if isinstance(layer, Recomputed)]
    over = list[int]()
    for layer in own:
        layer.over = over
    contexts = [{"factor": torch.tensor(1 + m / 8)} for m in range(MICROBATCHES)]
    inputs = list(torch.randn(MICROBATCHES, 3, WIDTH, generator=torch.Generator().manual_seed(1)))

    def give_back(m: int) -> None:
        over.append(m)
        contexts[m].clear()

    pipeline.run(
        inputs, lambda y, m: y.square().sum(), contexts, over=give_back if gives_back else None
    )
    grads = [p.grad.flatten().tolist() for layer in own for p in layer.parameters()]
    return over, max(layer.seen for layer in own), grads


@pytest.mark.parametrize("name", SCHEDULES)
def test_contexts_are_given_back_once_and_early_and_change_no_gradient(name: str) -> None:
    plain = on_ranks(measure, name, False, pp=2)
    ranks = on_ranks(measure, name, True, pp=2)
    for (over, early, grads), (_, _, want) in zip(ranks, plain, strict=True):
        assert sorted(over) == [*range(MICROBATCHES)]
        assert grads == want
        assert (early > 0) == (name != "gpipe")  # gpipe has all forwards first
