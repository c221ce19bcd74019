"""What users do: build twice, retry a step, freeze a part of a tie, differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kenotron_dist import Mesh
from kenotron_dist.placement import (
    TensorLayout,
    Tie,
    named_parameters,
    parameter_layouts,
    tie_storages,
)
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GradAccumulator,
    Reduce,
    SlicedOptimizer,
    allows_update,
    clip_,
    decay_groups,
    describe_groups,
    parameter_groups,
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])


def accumulator(model: nn.Module, mesh: Mesh) -> GradAccumulator:
    layouts = parameter_layouts(model, mesh.sizes)
    return GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=1e-5)


def sums(grads: GradAccumulator, model: nn.Module) -> dict[str, torch.Tensor]:
    grads.start(backwards=1)
    model(torch.ones(2, 3)).sum().backward()
    return {name: slice_.clone() for name, slice_ in grads.finish().items()}


def stale(mesh: Mesh) -> None:
    """Gradients from before, and accumulators from before, change nothing."""
    model = network()
    expected = sums(accumulator(model, mesh), model)
    other = network()
    other(torch.ones(2, 3)).sum().backward()  # before there is an accumulator
    grads = accumulator(other, mesh)
    for _ in range(2):
        found = sums(grads, other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        with pytest.raises(RuntimeError, match=r"after finish\(\)"):
            other(torch.ones(2, 3)).sum().backward()
    again = accumulator(other, mesh)  # takes the gradients of the first
    found = sums(again, other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_was_before_changes_nothing() -> None:
    on_ranks(stale, dp=2)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise ArithmeticError("no more ink")


def retried(mesh: Mesh) -> int:
    """A backward fails half-way on one rank, on another after some sums have started."""
    model = network()
    grads = accumulator(model, mesh)
    expected = sums(grads, model)
    for _ in range(3):
        grads.start(backwards=1)
        x = model[0](torch.ones(2, 3))
        x = Fails.apply(x) if mesh.rank else model[1](x)
        x = model[3](model[2](x if mesh.rank == 0 else model[1](x)))
        x = Fails.apply(x) if mesh.rank == 2 else x
        if mesh.rank:
            with pytest.raises(ArithmeticError):
                x.sum().backward()
        found = sums(grads, model)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    return len(mesh["dp"].pulse.flying)


def test_a_step_can_be_tried_again() -> None:
    assert on_ranks(retried, dp=3) == [0, 0, 0]


def forgotten(mesh: Mesh, reduce: Reduce) -> None:
    """Backwards of which the number is not known, some of them forgotten before ``finish``."""
    model = network()
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, reduce=reduce)
    expected = sums(grads, model)
    for given_up in (model, model[2:]):
        grads.start()
        given_up(torch.ones(2, 3)).sum().backward()
        grads.start()
        model(torch.ones(2, 3)).sum().backward()
        found = grads.finish()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("reduce", ["step", "micro_batch"])
def test_a_step_forgets_backwards_before_it(reduce: Reduce) -> None:
    on_ranks(forgotten, reduce, dp=2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        for layer in (self.a, self.b):
            layer.placements = {"weight": Tie("shared")}
        self.free = nn.Linear(3, 1)


def frozen(mesh: Mesh, which: str) -> str:
    model = Tied()
    tie_storages(model)
    for name in which:
        getattr(model, name).weight.requires_grad_(False)
    stages = mesh["pp"].size
    layouts = parameter_layouts(model, mesh.sizes, lambda name: int(name[0] != "a") * (stages - 1))
    own = {
        name: p
        for name, p in named_parameters(model).items()
        if stages == 1 or (name[0] == "a") == (mesh["pp"].rank == 0)
    }
    if which != "ab":
        with pytest.raises(ValueError) as error:
            GradAccumulator(own, layouts, mesh)
        return str(error.value)
    grads = GradAccumulator(own, layouts, mesh)
    optimizer = SlicedOptimizer(grads, torch.optim.SGD, decay_groups(grads.names, 0.0))
    grads.start()
    if "free.weight" in own:
        model.free(torch.ones(1, 3)).sum().backward()
    before = model.a.weight.clone()
    optimizer.step(grads.finish(), 0.1)
    assert torch.equal(model.a.weight, before)
    return ",".join(grads.logical)


@pytest.mark.parametrize("pp", [1, 2])
def test_ties_are_frozen_altogether_or_not_at_all(pp: int) -> None:
    assert on_ranks(frozen, "ab", pp=pp)[-1] == "free.weight,free.bias"
    words = "'b.weight' is frozen, but it is tied to 'a.weight', which is not: freeze all owners"
    for told in on_ranks(frozen, "b", pp=pp):
        assert told.startswith(words)


def unlike(mesh: Mesh, how: str) -> str:
    model = network()
    parameters = named_parameters(model)
    if mesh.rank and how == "order":
        parameters = dict(reversed(parameters.items()))
    if mesh.rank and how == "frozen":
        model[2].weight.requires_grad_(False)
    with pytest.raises(ValueError) as error:
        GradAccumulator(parameters, parameter_layouts(model, mesh.sizes), mesh)
    return str(error.value)


@pytest.mark.parametrize("how", ["order", "frozen"])
def test_data_ranks_that_differ_are_told(how: str) -> None:
    for told in on_ranks(unlike, how, dp=2):
        assert told.startswith("ranks 0 and 1 of the same dp_cp accumulate different parameters, [")


def test_bad_input_is_named() -> None:
    mesh = Mesh.connect()
    layer = nn.Linear(3, 2, bias=False)
    own = named_parameters(layer)
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 3\), but by its layout a"):
        GradAccumulator(own, {"weight": TensorLayout("weight", (20, 30))}, mesh)
    layouts = parameter_layouts(layer, mesh.sizes)
    with pytest.raises(ValueError, match=r"irregular: the model has no tensors \['no'\]: give lo"):
        GradAccumulator(own, layouts, mesh, irregular=["no"])
    grads = GradAccumulator(own, layouts, mesh)
    for backwards in (0, -1, 1.5):
        with pytest.raises(ValueError, match="give the number of backwards, from 1"):
            grads.start(backwards)
    optimizer = SlicedOptimizer(grads, torch.optim.SGD, decay_groups(grads.names, 0.0))
    for lr in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be finite and not negative"):
            optimizer.step(grads.finish() if lr < 0 else {}, lr)
    twice = decay_groups(grads.names, 0.0) * 2
    with pytest.raises(ValueError, match=r"parameters \['weight'\] are in two groups"):
        SlicedOptimizer(grads, torch.optim.SGD, twice)
    with pytest.raises(ValueError, match=r"groups name parameters \['other'\] that the model has"):
        SlicedOptimizer(grads, torch.optim.SGD, decay_groups(["weight", "other"], 0.0))
    layer.weight = nn.Parameter(torch.zeros(3, 2).t())
    with pytest.raises(ValueError, match=r"'weight' is not contiguous: give the module p.contig"):
        GradAccumulator(named_parameters(layer), layouts, mesh)


def test_unknown_words_are_no_silent_choice() -> None:
    with pytest.raises(
        ValueError, match="policy for steps that are not finite is 'skp': choose er"
    ):
        allows_update(None, "skp", 1)
    for kinds in (["norm"], "norms"):
        with pytest.raises(ValueError, match="give a list of some of 'norms', 'biases', 'embeddi"):
            parameter_groups(["a"], 0.1, exclude_kinds=kinds, layouts={})
    with pytest.raises(ValueError, match="weight_decay -1 must be finite and not negative"):
        decay_groups(["a"], -1)


def test_a_norm_may_be_a_number_and_layouts_a_mapping() -> None:
    slices = {"a": torch.ones(4)}
    clip_(slices, 1.0, 2.0)
    assert torch.allclose(slices["a"], torch.full((4,), 0.5))
    layouts = {"a": TensorLayout("a", (4,)), "b": TensorLayout("b", (2, 2))}
    table = describe_groups(decay_groups(["a", "b"], 0.1), layouts).splitlines()
    assert [row.split()[:2] for row in table[1:]] == [["0", "1"]]


@pytest.mark.parametrize("rule", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_a_rule_that_looks_at_whole_tensors_gets_no_slices(rule: type) -> None:
    grads = accumulator(network(), Mesh.connect())

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:  # L-BFGS takes no groups
        return rule(groups if rule is torch.optim.Adafactor else groups[0]["params"])

    with pytest.raises(ValueError, match=f"{rule.__name__} .* looks at whole tensors, and gets"):
        SlicedOptimizer(grads, make, decay_groups(grads.names, 0.0))
