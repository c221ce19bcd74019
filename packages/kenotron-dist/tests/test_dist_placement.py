"""What a module says of its parameters becomes the layout of logical tensors."""

import copy
import math

import pytest
import torch
from dist_layouts import cases
from hypothesis import given
from torch import nn

from kenotron_dist import Axis, GridView
from kenotron_dist.boxes import local_shape
from kenotron_dist.placement import (
    Chunk,
    FlatSlice,
    Partial,
    Shard,
    TensorLayout,
    Tie,
    materialize,
    named_parameters,
    named_placements,
    parameter_layouts,
    tie_storages,
)


class Matrix(nn.Module):
    """One parameter and what it says of it."""

    def __init__(self, shape, *placement, dtype=None, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype, device=device))
        self.placements = {"weight": placement}

    def forward(self, x):
        return x @ self.weight


class Cut(Matrix):
    """A matrix whose class, not the object, says how it is cut."""

    placements = {"weight": Shard("tp", 0)}

    def __init__(self):
        super().__init__((2, 2))
        del self.placements


@given(cases(partial=True))
def test_layouts_invert_local_shapes(case):
    layout, sizes = case.layout, case.sizes
    module = Matrix(local_shape(layout, GridView.at(sizes, 0)), *layout.placement, device="meta")
    found = parameter_layouts(module, sizes, lambda name: layout.stages[0])["weight"]
    assert found.shape == layout.shape
    assert found.placement == layout.placement
    assert found.stages == layout.stages[:1]
    assert (found.name, found.owners, found.owner_stages) == (
        "weight", ("weight",), layout.stages[:1]
    )  # fmt: skip


def test_a_parameter_without_a_placement_is_replicated():
    layouts = parameter_layouts(nn.Linear(3, 2), {"tp": 4})
    assert layouts["weight"] == TensorLayout(
        "weight", (2, 3), (), (0,), ("weight",), (0,), role="hidden"
    )
    assert layouts["bias"].shape == (2,)
    assert parameter_layouts(nn.ReLU(), {"tp": 4}) == {}


def test_one_placement_or_a_tuple_of_them_on_object_or_class():
    model = nn.Sequential(Matrix((2, 2), Shard("tp", 0), Partial("cp")), Cut(), nn.Linear(1, 1))
    model[2].placements = {"bias": Partial("tp")}
    assert named_placements(model) == {
        "0.weight": (Shard("tp", 0), Partial("cp")),
        "1.weight": (Shard("tp", 0),),
        "2.bias": (Partial("tp"),),
    }


def compiled_models():
    """Compiled in place, wrapped, wrapped inside, and wrapped twice."""

    def model():
        return nn.Sequential(Matrix((2, 2), Shard("tp", 0)), nn.Linear(2, 2))

    in_place, inside, twice = model(), model(), model()
    in_place[0].compile(backend="eager")
    inside[0] = torch.compile(inside[0], backend="eager")
    twice[0] = torch.compile(twice[0], backend="eager")
    return {
        "in place": in_place,
        "wrapped": torch.compile(model(), backend="eager"),
        "inside": inside,
        "twice": torch.compile(twice, backend="eager"),
    }


@pytest.mark.parametrize("how", ["in place", "wrapped", "inside", "twice"])
def test_a_compiled_module_keeps_its_names(how):
    model = compiled_models()[how]
    names = ["0.weight", "1.weight", "1.bias"]
    assert named_placements(model) == {"0.weight": (Shard("tp", 0),)}
    assert list(named_parameters(model)) == names
    layouts = parameter_layouts(model, {"tp": 2})
    assert {name: layout.shape for name, layout in layouts.items()} == {
        "0.weight": (4, 2), "1.weight": (2, 2), "1.bias": (2,)
    }  # fmt: skip


def test_only_the_wrapper_is_stripped_from_a_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.my_orig_mod = nn.Linear(1, 1, bias=False)

    assert list(named_parameters(Odd())) == ["my_orig_mod.weight"]


def test_a_module_used_under_two_names_has_its_placement_under_both():
    shared = Matrix((2, 2), Shard("tp", 0))
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert list(named_placements(model)) == ["a.weight", "b.weight"]
    with pytest.raises(ValueError, match=r"'a.weight' and 'b.weight' are one Parameter: give each"):
        parameter_layouts(model, {"tp": 2})


@pytest.mark.parametrize(
    ("shape", "placement", "words"),
    [
        ((4, 4), (Shard("ep", 0),), "weight: no mesh axis 'ep'; there are pp, tp"),
        ((4, 4), (Shard("tp", 2),), r"weight: no dim 2 to cut in a tensor of shape \[4, 4\]"),
        ((4,), (Shard("tp", -1),), r"weight: no dim -1 to cut in a tensor of shape \[4\]"),
        ((4, 4), (Shard("tp", 0), Shard("tp", 1)), "weight: one axis cuts twice: tp, tp"),
        (
            (5, 4),
            (Shard("tp", 0, (Chunk(8), Chunk(4, parts=1))),),
            r"weight: dim 0 has 5 local elements, but chunks \[8, 4\] over 2 tp ranks leave 8",
        ),
    ],
)
def test_a_placement_that_does_not_fit_is_an_error(shape, placement, words):
    with pytest.raises(ValueError, match=words):
        parameter_layouts(Matrix(shape, *placement), {"pp": 1, "tp": 2})


def test_a_placement_without_a_parameter_is_an_error():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    for name in ("bias", "gate"):
        model[0].placements = {name: Shard("tp", 0)}
        words = f"placement without a parameter: '0.{name}' is declared in placements, but Linear"
        with pytest.raises(ValueError, match=words):
            named_placements(model)


ROWS = Shard("tp", 0)


def tied(*shapes, first=None):
    """Modules that say of their weights that they are logical tensor ``embedding.weight``."""
    names = ["embedding", "middle", "head"]
    tie = Tie("embedding.weight")
    parts = {n: Matrix(s, ROWS, tie) for n, s in zip(names, shapes, strict=False)}
    if first is not None:
        parts["embedding"].placements = {"weight": first}
    return nn.ModuleDict({**parts, "norm": nn.LayerNorm(2)})


def test_tied_parameters_are_one_logical_tensor_with_the_stages_of_all():
    stages = {"embedding.weight": 0, "head.weight": 3, "middle.weight": 1}
    model = tied((4, 2), (4, 2), (4, 2))
    layouts = parameter_layouts(model, {"pp": 4, "tp": 2}, lambda name: stages.get(name, 2))
    for name in stages:
        layout = layouts[name]
        assert layout.name == "embedding.weight"
        assert layout.stages == (0, 1, 3)
        assert layout.owners == ("embedding.weight", "head.weight", "middle.weight")
        assert layout.owner_stages == (0, 3, 1)
        assert layout.shape == (8, 2)
    assert layouts["norm.bias"].stages == (2,)
    at_home = parameter_layouts(model, {"pp": 1, "tp": 2})["head.weight"]
    assert (at_home.stages, at_home.owner_stages) == ((0,), (0, 0, 0))


def test_tied_parameters_that_differ_are_an_error():
    with pytest.raises(ValueError, match=r"tied parameters of 'embedding.weight' differ: embed"):
        parameter_layouts(tied((4, 2), (6, 2)), {"tp": 2})
    square = tied((2, 4), (4, 2))
    square["middle"].placements = {"weight": (Shard("tp", 1), Tie("embedding.weight"))}
    square["embedding"].placements = {"weight": (Shard("tp", 0), Tie("embedding.weight"))}
    with pytest.raises(ValueError, match=r"middle.weight \[4, 4\] cut at \[\('tp', 1\)\]"):
        parameter_layouts(square, {"tp": 2})


def shares(model, *names):
    pointers = {model[name].weight.data_ptr() for name in names}
    return len(pointers) == 1


def test_storages_are_tied_again_after_copies_and_to_empty():
    model = tied((3, 2), (3, 2), (3, 2))
    tie_storages(model)
    kept = model["embedding"].weight.clone()
    assert shares(model, "embedding", "head", "middle")
    copied, shapes = copy.deepcopy(model), copy.deepcopy(model).to("meta")
    tie_storages(copied)
    materialize(shapes, "cpu")
    for other in (copied, shapes):
        assert shares(other, "embedding", "head", "middle")
        assert not shares(nn.ModuleDict({"a": model["head"], "b": other["head"]}), "a", "b")
        leaves = {id(p) for p in named_parameters(other).values()}
        assert len(leaves) == 5
        with torch.no_grad():
            other["head"].weight.fill_(7)
        assert other["embedding"].weight.eq(7).all()
    assert torch.equal(model["head"].weight, kept)


def test_each_owner_has_a_gradient_of_its_own():
    model = tied((2, 2), (2, 2))
    tie_storages(model)
    (model["embedding"].weight * 2 + model["middle"].weight * 3).sum().backward()
    assert model["embedding"].weight.grad.eq(2).all()
    assert model["middle"].weight.grad.eq(3).all()


def test_a_tensor_named_by_a_tie_need_not_say_so_itself():
    model = tied((3, 2), (3, 2), first=(Shard("tp", 0),))
    layouts = parameter_layouts(model, {"tp": 2})
    assert layouts["embedding.weight"].owners == ("embedding.weight", "middle.weight")
    tie_storages(model)
    assert shares(model, "embedding", "middle")


def test_a_layout_is_renamed_and_sliced():
    layout = TensorLayout("w", (4, 4), (Shard("tp", 0),), (1,), ("w",), (1,))
    other = layout.renamed("w.exp_avg")
    assert (other.name, other.shape, other.stages) == ("w.exp_avg", (4, 4), (1,))
    assert layout.flat is None
    sliced = layout.sliced(2, 5, ("dp",))
    assert sliced.flat == FlatSlice(2, 5, ("dp",))
    assert sliced.shards == layout.shards
    assert math.prod(local_shape(sliced, GridView.at({"tp": 2}, 0))) == 8


def test_a_module_that_holds_an_axis_is_copied_with_the_same_axis():
    layer = nn.Linear(2, 2)
    layer.axis = Axis.solo("tp")
    twin = copy.deepcopy(layer)
    assert twin.axis is layer.axis and copy.copy(layer.axis) is layer.axis
    assert twin.weight is not layer.weight
    assert Axis.solo("tp") != Axis.solo("tp")
    assert len({Axis.solo("tp"), Axis.solo("tp")}) == 2
