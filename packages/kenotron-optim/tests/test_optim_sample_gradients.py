"""Gradients of samples, added in one tree: the bits of one process on every dp, pp and ZeRO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, tree_sum
from kenotron_dist.placement import (
    Partial,
    Shard,
    Tie,
    named_parameters,
    parameter_layouts,
    tie_storages,
)
from kenotron_dist.separate_uses import separate_uses
from kenotron_dist.testing import on_ranks
from kenotron_optim import ExactNorm, SampleGradients

SAMPLES = 12
SHAPES = {"a": (6, 5), "b": (6, 5), "bias": (7,), "one": (1,), "unused": (3,)}


class Samples(nn.Module):
    """A tied matrix, vectors that few ranks divide, and one that no sample uses."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.ones(shape, dtype=dtype))
            module.placements = {"weight": Tie("shared")} if name in "ab" else {}
            self.add_module(name, module)
        tie_storages(self)


def numbers(path: str, sample: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The gradient of a sample: its sum over samples depends on the order of the additions."""
    name = path.partition(".")[0]
    draw = torch.Generator().manual_seed(1 + sample + 100 * len(name) + 10_000 * ord(name[0]))
    found = torch.randn(SHAPES[name], generator=draw)
    return (found * 10.0 ** (sample % 5 - 2)).to(dtype)


def accumulator(
    mesh: Mesh, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[SampleGradients, dict[str, nn.Parameter]]:
    """Uses of the tied matrix are on two stages, where there are two."""
    model = Samples(dtype)
    layouts = parameter_layouts(
        model, mesh.sizes, lambda path: int(path[0] != "a") * (mesh["pp"].size - 1)
    )
    stage = mesh["pp"].rank
    kept = {p: x for p, x in named_parameters(model).items() if layouts_stage(p, mesh) == stage}
    return SampleGradients(kept, layouts, mesh, **options), kept


def layouts_stage(path: str, mesh: Mesh) -> int:
    return int(path[0] != "a") * (mesh["pp"].size - 1)


def summed(
    mesh: Mesh, dtype: torch.dtype = torch.float32, bucket_mb: float | None = None
) -> tuple[dict[str, tuple[int, list[float]]], float]:
    """This rank's slices with the place of each, and the norm."""
    grads, parameters = accumulator(mesh, dtype, bucket_mb=bucket_mb)
    own = SAMPLES // mesh["dp"].size
    for _ in range(2):  # the second step forgets the first
        grads.start(own)
        for sample in range(own * mesh["dp"].rank, own * (mesh["dp"].rank + 1)):
            for path, parameter in parameters.items():
                if not path.startswith("unused"):
                    parameter.backward(numbers(path, sample, dtype))
        slices = grads.finish()
    assert all(parameter.grad is None for parameter in parameters.values())
    places = {name: grads.owned_layout(name).flat.start for name in slices}
    found = {name: (places[name], slices[name].tolist()) for name in slices}
    return found, ExactNorm(grads)(slices).item()


def whole(ranks: list[Any]) -> dict[str, list[float]]:
    """Whole tensors; replicas on stages must agree."""
    found: dict[str, dict[int, list[float]]] = {}
    for slices, _ in ranks:
        for name, (start, values) in slices.items():
            assert found.setdefault(name, {}).setdefault(start, values) == values
    return {name: [x for at in sorted(own) for x in own[at]] for name, own in found.items()}


def expected(dtype: torch.dtype) -> dict[str, list[float]]:
    def tree(path: str) -> Tensor:
        return tree_sum([numbers(path, i, dtype).float() for i in range(SAMPLES)])

    own = {f"{name}.weight": tree(name) for name in ("bias", "one")}
    own |= {"shared": tree("a") + tree("b"), "unused.weight": torch.zeros(3)}
    return {name: tensor.flatten().tolist() for name, tensor in own.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{}, *({"dp": n} for n in (2, 3, 4)), {"pp": 2}, {"pp": 2, "dp": 2}], ids=str
)
def test_every_layout_has_the_bits_of_one_tree(sizes: dict[str, int], dtype: torch.dtype) -> None:
    ranks = on_ranks(summed, dtype, **sizes)
    assert whole(ranks) == expected(dtype)
    alone = on_ranks(summed, dtype)
    assert all(norm == alone[0][1] for _, norm in ranks)


def test_buckets_change_nothing() -> None:
    assert whole(on_ranks(summed, torch.float32, 1e-5, dp=3)) == expected(torch.float32)


def refused(mesh: Mesh) -> dict[str, str]:
    """What each misuse is told."""
    grads, parameters = accumulator(mesh)
    weight = parameters["bias.weight"]

    def partly() -> None:
        grads.start(2)
        weight.backward(numbers("bias", 0))
        grads.finish()

    def unnumbered() -> None:
        grads.start()
        weight.backward(numbers("bias", 0))

    def twice() -> None:
        grads.start(1)
        grads.finish()
        grads.finish()

    found = {}
    for call in (partly, unnumbered, twice, lambda: grads.start(2, zeroed=True)):
        with pytest.raises((RuntimeError, ValueError)) as error:
            call()
        found[call.__name__] = str(error.value)
    return found


def test_misuse_is_named() -> None:
    [told] = on_ranks(refused)
    assert "bias.weight has gradients of 1 of 2 samples" in told["partly"]
    assert "call start(backwards=...)" in told["unnumbered"]
    assert "finish() was called before" in told["twice"]
    assert "zeroed=True adds without order" in told["<lambda>"]


def cut(mesh: Mesh) -> str:
    with pytest.raises(ValueError, match="no tree of samples") as error:
        accumulator(mesh)
    return str(error.value)


def test_other_axes_are_refused() -> None:
    assert "SampleGradients: cp 2 with chunks 1: these sums" in on_ranks(cut, cp=2)[0]


class Stack(nn.Module):
    """Four experts, of which each rank of ep has some."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 // ep, 3))
        self.placements = {"weight": Shard("ep", 0)}


def of_expert(sample: int) -> Tensor:
    draw = torch.Generator().manual_seed(sample)
    return torch.randn(4, 3, generator=draw) * 10.0 ** (sample % 5 - 2)


def experts_summed(mesh: Mesh) -> tuple[dict[str, Any], float]:
    """This rank's slice of its experts' sum, and the norm; ranks of ep have all their samples."""
    model, ep = Stack(mesh["ep"].size), mesh["ep"]
    grads = SampleGradients(
        named_parameters(model), parameter_layouts(model, mesh.axis_sizes, lambda _: 0), mesh
    )
    own = SAMPLES // mesh["dp"].size
    grads.start(own)
    for sample in range(own):
        uses = separate_uses(model.weight, ep.size)
        for source in reversed(range(ep.size)):
            rank = mesh["dp"].rank - ep.rank + source
            use = of_expert(rank * own + sample).chunk(ep.size)[ep.rank]
            uses[source].backward(use)
    slices = grads.finish()
    assert model.weight.grad is None
    layout = grads.owned_layout("weight")
    return {"first": (ep.rank, layout.flat.start, slices["weight"].tolist())}, ExactNorm(grads)(
        slices
    ).item()


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 3}], ids=str
)
def test_experts_have_the_bits_of_one_tree(sizes: dict[str, int]) -> None:
    ranks = on_ranks(experts_summed, **sizes)
    found = [x for *_, values in sorted(own["first"] for own, _ in ranks) for x in values]
    want = tree_sum([of_expert(i) for i in range(SAMPLES)])
    assert found == want.flatten().tolist()
    [(_, alone)] = on_ranks(experts_summed)
    assert all(norm == alone for _, norm in ranks)


def uses_missing(mesh: Mesh) -> list[str]:
    """What is told of a sum of several leaves, and of a leaf that does not come."""
    model, told = Stack(2), []
    layouts = parameter_layouts(model, mesh.axis_sizes, lambda _: 0)
    for uses in (lambda w: w, lambda w: separate_uses(w, 2)[0]):
        grads = SampleGradients(named_parameters(model), layouts, mesh)
        grads.start(1)
        with pytest.raises(RuntimeError) as error:
            uses(model.weight).backward(torch.ones(2, 3))
            grads.finish()
        told.append(str(error.value))
    return told


def test_every_leaf_must_come_by_itself() -> None:
    for one, missing in on_ranks(uses_missing, dp=2, ep=2):
        assert "weight came as one sum, but 2 leaves" in one and "separate_uses" in one
        assert "weight has gradients of 1 of 2 leaves of a backward pass" in missing


def shards_of_experts(mesh: Mesh) -> str:
    model = Stack(1)
    layouts = parameter_layouts(model, mesh.axis_sizes, lambda _: 0)
    with pytest.raises(ValueError, match="no tree of samples") as error:
        SampleGradients(named_parameters(model), layouts, mesh)
    return str(error.value)


def test_tp_divides_the_shards_that_have_tokens_of_experts() -> None:
    assert "tp 2 with shards 1: these sums" in on_ranks(shards_of_experts, tp=2)[0]


def partial(mesh: Mesh) -> str:
    norm = nn.LayerNorm(3)
    norm.placements = {"weight": Partial("tp")}
    parameters = dict(norm.named_parameters())
    with pytest.raises(ValueError, match="no tree of samples") as error:
        SampleGradients(parameters, parameter_layouts(norm, mesh.sizes, lambda _: 0), mesh)
    return str(error.value)


def test_sums_over_tp_are_those_of_each_backward() -> None:
    assert "SampleGradients: weight: these sums" in on_ranks(partial, tp=2)[0]
