"""ZeRO-3 with layers of any kind: none reads a parameter that is freed, and all are freed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator, SlicedOptimizer, decay_groups

WIDTH = 8


@dataclass
class Hidden:
    """An output that autograd's hooks cannot be registered on."""

    x: Tensor


class Layer(nn.Module):
    """A residual block; its gain is read by a kernel that does not check storages."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        x = x.x if isinstance(x, Hidden) else x
        return x + torch.tanh(self.linear(x) * self.gain)


class Hides(Layer):
    """Its output is an object."""

    def forward(self, x: Any) -> Hidden:
        return Hidden(super().forward(x))


class Prefix(Layer):
    """Its input has its gradient before its own branch begins the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.gain.cos()) * self.gain)


class Positions(nn.Module):
    """Hands a parameter to the next layer, and to that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, self.table[: len(x)]


class Adds(Layer):
    """Reads what ``Positions`` hands to it."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(x[0] * x[1])


class Scales(nn.Module):
    """Leaves its product to the loss, which gets what it was given times a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Casts(Scales):
    """The loss gets another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class NormsFirst(Scales):
    """Reads one parameter itself, and says that it leaves the other one to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain

    def leaves_weight_to_loss(self, x: Tensor) -> bool:
        return x.requires_grad or not torch.is_grad_enabled()


def again(layer: nn.Module) -> Callable[[Any], Any]:
    """Activation checkpointing outside of the layer, whose second forward is cut short."""
    return lambda x: checkpoint(layer, x, use_reentrant=False)


CASES: dict[str, tuple[list[type[nn.Module]], bool, bool]] = {
    "objects": ([Layer, Hides, Hides, Layer], False, False),
    "a leaf is the input": ([Prefix, Layer], True, False),
    "a parameter is an output": ([Layer, Positions, Adds, Layer], False, False),
    "scaled for the loss": ([Layer, Scales], False, False),
    "cast for the loss": ([Layer, Casts], False, False),
    "one parameter for the loss": ([Layer, Layer, NormsFirst], False, False),
    "checkpointed outside": ([Layer, Layer, Layer, Layer], False, True),
}


def learning(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


def build(mesh: Mesh, case: str, stage: int) -> tuple[nn.ModuleList, Any, SlicedOptimizer]:
    torch.manual_seed(0)
    model = nn.ModuleList(kind() for kind in CASES[case][0])
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=1e-4)
    groups = decay_groups(grads.names, 0.1, exclude=[])
    optimizer = SlicedOptimizer(grads, lambda g: torch.optim.AdamW(g, foreach=False), groups, stage)
    optimizer.overlap_forward(model)
    return model, grads, optimizer


def losses(mesh: Mesh, case: str, stage: int) -> list[float]:
    model, grads, optimizer = build(mesh, case, stage)
    _, is_leaf, outside = CASES[case]
    draw, found = torch.Generator().manual_seed(mesh.rank), []
    for _ in range(3):
        grads.start(backwards=1)
        x: Any = torch.randn(5, WIDTH, generator=draw).requires_grad_(is_leaf)
        for layer in model:
            x = again(layer)(x) if outside else layer(x)
        if isinstance(model[-1], Scales):
            x = x @ model[-1].weight.to(x.dtype)
        loss = x.square().sum()
        loss.backward()
        if stage == 3:
            assert learning(model) == 0
        optimizer.step(grads.finish(), lr=0.01)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("case", CASES)
def test_any_layer_has_its_parameters_and_is_freed(case: str) -> None:
    assert on_ranks(losses, case, 3, dp=2) == on_ranks(losses, case, 1, dp=2)


LATE = ("scaled for the loss", "cast for the loss", "one parameter for the loss")


def kept_for_the_loss(mesh: Mesh) -> list[bool]:
    """Whether the last layer has its weight after the forward, with gradients and without."""
    found = []
    for case, graph in itertools.product(LATE, (True, False)):
        model, grads, _ = build(mesh, case, 3)
        grads.start(backwards=1)
        x: Any = torch.ones(2, WIDTH)
        with torch.set_grad_enabled(graph):
            for layer in model:
                x = layer(x)
        found.append(model[-1].weight.untyped_storage().nbytes() > 0)
    return found


def test_a_weight_that_the_loss_reads_stays_until_then() -> None:
    """Without a graph only a layer that says so is known."""
    assert on_ranks(kept_for_the_loss) == [[True, False, True, False, True, True]]


def fails(mesh: Mesh) -> tuple[int, int]:
    """Bytes after a forward that raises, and after the step that follows."""
    model, grads, optimizer = build(mesh, "checkpointed outside", 3)

    def refuse(*_: object) -> None:
        raise ArithmeticError("no more ink")

    hook = model[1].linear.register_forward_hook(refuse)
    grads.start(backwards=1)
    with pytest.raises(ArithmeticError):
        model[1](model[0](torch.ones(2, WIDTH)))
    after = learning(model[1])
    hook.remove()
    grads.start(backwards=1)
    model[1](model[0](torch.ones(2, WIDTH))).sum().backward()
    optimizer.step(grads.finish(), lr=0.01)
    return after, learning(model)


def test_a_forward_that_raises_frees_its_parameters() -> None:
    assert on_ranks(fails, dp=2) == [(0, 0)] * 2


def saved(mesh: Mesh) -> list[float]:
    model, _, optimizer = build(mesh, "checkpointed outside", 3)
    for call in (model.state_dict, lambda: model.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"parameter '0.gain' has no memory; call wait"):
            call()
    optimizer.wait_for_parameters()
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
    optimizer.reload()
    optimizer.wait_for_parameters()
    return [model[3].gain.sum().item(), model[0].gain.sum().item()]


def test_a_state_dict_is_not_read_where_there_are_no_values() -> None:
    assert on_ranks(saved, dp=2) == [[2.0 * WIDTH] * 2] * 2
