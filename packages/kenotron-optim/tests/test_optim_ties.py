"""One logical tensor with several owners: a single gradient, update and element of the norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import Partial, Tie, named_parameters, parameter_layouts, tie_storages
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, decay_groups


def numbers() -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(3))


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, foreach=False)


class Tied(nn.Module):
    """One matrix used twice through two leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        for layer in (self.a, self.b):
            layer.placements = {"weight": Tie("shared")}
        tie_storages(self)


def tied_step(mesh: Mesh) -> tuple[float, list[float]]:
    """Both owners on one stage, or each on its own."""
    model = Tied()
    layouts = parameter_layouts(
        model, mesh.sizes, lambda name: int(name[0] == "b") * (mesh["pp"].size - 1)
    )
    own = named_parameters(model)
    if mesh["pp"].size > 1:
        own = {n: p for n, p in own.items() if n.startswith("ab"[mesh["pp"].rank])}
    grads = GradAccumulator(own, layouts, mesh)
    optimizer = SlicedOptimizer(grads, adamw, decay_groups(grads.names, 0.1))
    grads.start()
    for name, p in own.items():
        (p * numbers() * (2 if name[0] == "a" else 3)).sum().backward()
    slices = grads.finish()
    norm = GlobalNorm(grads)(slices).item()
    optimizer.step(slices, 0.1)
    return norm, next(iter(own.values())).flatten().tolist()


def tied_in_bfloat16(mesh: Mesh) -> list[float]:
    """Each owner gets 1 from every one of 300 micro-batches: bfloat16 would stop at 256."""
    model = Tied().bfloat16()
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    grads.start()
    for _ in range(300):
        (model.a.weight.sum() + model.b.weight.sum()).backward()
    return next(iter(grads.finish().values())).tolist()


def test_both_owners_add_up_in_float32() -> None:
    [found] = on_ranks(tied_in_bfloat16)
    assert found == [600.0] * 36


def test_tied_parameters_are_one_element_on_one_stage_and_on_two() -> None:
    [want] = on_ranks(tied_step)
    weight = Tied().a.weight
    (weight * numbers() * 5).sum().backward()
    assert want[0] == pytest.approx(weight.grad.norm().item(), rel=1e-6)
    assert on_ranks(tied_step, pp=2) == [want, want]


class Shared(nn.Module):
    """A partial norm that two stages share, as a model with tied norms would have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 3, bias=False), nn.Linear(1, 3, bias=False)
        for layer in (self.a, self.b):
            layer.weight.data.fill_(1.0)
            layer.placements = {"weight": (Partial("tp"), Tie("a.weight"))}


def shared_step(mesh: Mesh) -> list[float]:
    model = Shared()
    layouts = parameter_layouts(model, mesh.sizes, lambda name: int(name[0] == "b"))
    own = {n: p for n, p in named_parameters(model).items() if n[0] == "ab"[mesh["pp"].rank]}
    grads = GradAccumulator(own, layouts, mesh)
    grads.start()
    for name, p in own.items():
        (p * (2.0 if name[0] == "a" else 3.0)).sum().backward()
    return grads.finish()["a.weight"].tolist()


def test_a_partial_tensor_tied_over_stages_is_summed_over_both() -> None:
    assert on_ranks(shared_step, pp=2, tp=2) == [[10.0] * 3] * 4


def test_a_tied_tensor_is_frozen_under_all_names_or_none() -> None:
    model = Tied()
    model.b.weight.requires_grad_(False)
    mesh = Mesh.connect()
    with pytest.raises(ValueError, match="'b.weight' is frozen, but it is tied to 'a.weight', wh"):
        GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
