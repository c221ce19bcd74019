"""Models and references for the tests: plain layers, and the loop that a pipeline must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Axis
from kenotron_pp import Pipeline, Schedule, Stages

needs_gpu = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no GPU here")
WIDTH, VOCABULARY = 8, 13


class Block(nn.Module):
    """Norm, two linears with something between them, residual; may recompute, may add a loss."""

    adds_loss = True

    def __init__(self, recompute: bool = False, aux: bool = False) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.recompute, self.aux = recompute, aux
        self.auxiliary_losses: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        if self.aux and self.auxiliary_losses is not None:
            self.auxiliary_losses.add(hidden.float().square().mean() * 0.125)
        return x + self.down(hidden)


class Pair(nn.Module):
    """A diamond: an early tensor is carried beside the others and used again at the end.

    Activation: (x, early, whole numbers).
    """

    def __init__(self, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.block, self.first, self.last = Block(), first, last

    def forward(self, x: Any) -> Any:
        if self.first:
            y = self.block(x)
            return y, torch.tanh(y), torch.arange(y.shape[0])
        x, early, numbers = x
        y = self.block(x) * (1 + numbers[:, None] / 8)
        return y + early * early if self.last else (y, early, numbers)


class Named(nn.Module):
    """Passes dicts; drops a tensor for which a gradient would come back, so that it gets None."""

    def __init__(self, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.block, self.first, self.last = Block(), first, last

    def forward(self, x: Any) -> Any:
        if self.first:
            return {"a": self.block(x), "b": torch.sin(x)}
        y = {"a": self.block(x["a"]), "b": self.block.norm(x["b"])}
        return y["a"] if self.last else y


def decoder(count: int, *, recompute: bool = False, aux: bool = False) -> list[nn.Module]:
    """Embedding, blocks, norm, head: plain layers."""
    torch.manual_seed(0)
    blocks = [Block(recompute, aux) for _ in range(count - 3)]
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return [nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), head]


def tie(layers: Sequence[nn.Module]) -> None:
    """Embedding and head: separate leaves over one storage."""
    layers[-1].weight.data = layers[0].weight.data


def tokens(microbatches: int, rows: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCABULARY, (microbatches, rows), generator=generator, device="cpu")
    return list(drawn.to(torch.get_default_device()))


def token_loss(inputs: Sequence[Tensor]) -> Callable[[Tensor, int], Tensor]:
    def loss(y: Tensor, m: int) -> Tensor:
        return nn.functional.cross_entropy(y.float(), inputs[m].roll(1)) * (m + 1) / 8

    return loss


def plain(
    layers: Sequence[nn.Module], inputs: Sequence[Any], loss_fn: Callable[[Any, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """What one process computes without a pipeline: losses, main and added by layers."""
    total, added = torch.zeros(()), []

    class Sink:
        def add(self, scalar: Tensor) -> None:
            if recording:
                added.append(scalar)

    for m, x in enumerate(inputs):
        for layer in layers:
            if getattr(layer, "adds_loss", False):
                layer.auxiliary_losses = Sink()
        recording, before = True, len(added)
        for layer in layers:
            x = layer(x)
        recording = False
        loss = loss_fn(x, m)
        torch.autograd.backward([loss, *added[before:]])
        total += loss.detach()
    for layer in layers:
        layer.auxiliary_losses = None
    return total, torch.tensor(sum((scalar.item() for scalar in added), 0.0))


def pipeline_of(
    layers: Sequence[nn.Module], axis: Axis, schedule: Schedule, pairs: Any = None
) -> tuple[Pipeline, dict[int, nn.Module]]:
    """A pipeline over copies of this rank's layers, and those copies by index."""
    named = [(str(i), layer) for i, layer in enumerate(layers)]
    stages = Stages.balanced(named, [1.0] * len(named), axis.size, schedule)
    whole = [(str(i), layer) for i, layer in enumerate(copied(layers))]
    chunks = stages.chunks(whole, axis.rank)
    lists: list[Any] = [[layer for _, layer in chunk] for chunk in chunks]
    given = lists if schedule.chunks > 1 else lists[0]
    pipeline = Pipeline(given, axis, schedule, pairs=pairs)
    return pipeline, {int(name): layer for chunk in chunks for name, layer in chunk}


def copied(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Copies that are tied where the originals are."""
    tied = shares(layers)
    new = [copy.deepcopy(layer) for layer in layers]
    if tied:
        tie(new)
    return new


def shares(layers: Sequence[nn.Module]) -> bool:
    ends = [getattr(layers[i], "weight", None) for i in (0, -1)]
    return None not in ends and ends[0].data_ptr() == ends[1].data_ptr()


def differences(own: dict[int, nn.Module], reference: Sequence[nn.Module]) -> list[str]:
    """Parameters whose gradients are not the reference's, bit for bit."""
    found = []
    for i, layer in own.items():
        want = dict(reference[i].named_parameters())
        for name, parameter in layer.named_parameters():
            got, expected = parameter.grad, want[name].grad
            if got is None or expected is None:
                same = got is expected or not (expected if got is None else got).any()
            else:
                same = torch.equal(got, expected)
            if not same:
                found.append(f"{i}.{name}")
    return found
