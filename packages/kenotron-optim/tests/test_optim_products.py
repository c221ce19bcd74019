"""Weight-gradient products that layers add to fp32 buffers themselves: the sums of a gradient."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import Tie, named_parameters, parameter_layouts, tie_storages
from kenotron_dist.testing import on_ranks
from kenotron_dist.weight_products import taker_of
from kenotron_optim import GradAccumulator, partition

TOKENS = 24


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        taker = taker_of(weight)
        if taker is None:
            return dy @ weight, dy.t() @ x
        taker([(dy, x)])
        return dy @ weight, None


class Linear(nn.Linear):
    """A layer that looks for a taker."""

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight)


class Net(nn.Module):
    """Two matrices whose rows 2 and 4 ranks share evenly, one that they do not, and a tie."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Linear(6, 8, bias=False), Linear(8, 5, bias=False)
        self.third, self.table = Linear(5, 8, bias=False), nn.Module()
        self.table.weight = nn.Parameter(torch.linspace(-1, 1, 40).view(8, 5))
        for module in (self.third, self.table):
            module.placements = {"weight": Tie("table.weight")}
        self.scale = nn.Parameter(torch.ones(8))
        self.to(dtype)
        tie_storages(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.scale
        return (y + self.table.weight.sum(1)).float().square().sum()


MATRICES = ["first.weight", "second.weight", "third.weight"]


def rows(dtype: torch.dtype) -> Tensor:
    return torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def build(mesh: Mesh, dtype: torch.dtype, taken: bool, **options) -> tuple[Net, GradAccumulator]:
    model = Net(dtype)
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, **options)
    if taken:
        with mock.patch.object(partition, "PRODUCT_ROWS", 1):
            grads.take_products(MATRICES, anywhere=True)
    return model, grads


def gradients(mesh: Mesh, dtype: torch.dtype, taken: bool, how: str) -> dict[str, list[float]]:
    """Two steps, of which the first leaves its numbers in the buffers."""
    model, grads = build(mesh, dtype, taken)
    own = rows(dtype).chunk(mesh["dp"].size)[mesh["dp"].rank]
    slices = {}
    for _ in range(2):
        if how == "zeroed":
            grads.start(zeroed=True)
        else:
            grads.start(3 if how == "early" else None)
        for micro in own.tensor_split(3):
            model(micro).backward()
            assert all(p.grad is None for p in model.parameters())
        slices = grads.finish()
    return {name: slice_.tolist() for name, slice_ in slices.items()}


@pytest.mark.parametrize("how", ["plain", "early", "zeroed"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_sums_are_those_of_gradients(dp: int, how: str) -> None:
    with_gradients, with_products = (
        on_ranks(gradients, torch.float32, taken, how, dp=dp) for taken in (False, True)
    )
    for want, got in zip(with_gradients, with_products, strict=True):
        assert got.keys() == want.keys()
        for name, values in got.items():
            assert any(values) or not values, name
            assert values == pytest.approx(want[name], rel=1e-5, abs=1e-5), name


def test_products_of_bfloat16_are_not_rounded() -> None:
    """The buffer has the fp32 product of bfloat16 factors, to the last bits."""
    weight = nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))
    mesh = Mesh.connect()
    grads = GradAccumulator({"w": weight}, _layouts(weight, mesh), mesh)
    assert grads.take_products(["w"], anywhere=True) == ["w"]
    dy, x = torch.randn(9, 4).bfloat16(), torch.randn(9, 6).bfloat16()
    taker = taker_of(weight)
    assert taker is not None
    for factors in ([(dy, x)], [(dy, x), (dy, 2 * x)]):  # a second one adds to the first
        taker(factors)
    want = 4 * (dy.double().t() @ x.double())
    torch.testing.assert_close(grads.finish()["w"].view(4, 6).double(), want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(want.float(), want.bfloat16().float())


def test_after_a_start_with_zeros_the_first_product_is_added_too() -> None:
    """What a graph has recorded once is replayed for every micro-batch."""
    mesh = Mesh.connect()
    weight = nn.Parameter(torch.zeros(4, 6))
    grads = GradAccumulator({"w": weight}, _layouts(weight, mesh), mesh)
    grads.take_products(["w"], anywhere=True)
    grads.start(zeroed=True)
    grads.buffers[0].fill_(1.0)
    taker = taker_of(weight)
    assert taker is not None
    taker([(torch.ones(9, 4), torch.ones(9, 6))])
    assert grads.finish()["w"].tolist() == [10.0] * 24


def _layouts(weight: nn.Parameter, mesh: Mesh) -> dict:
    module = nn.Module()
    module.w = weight
    return parameter_layouts(module, mesh.sizes)


def started(mesh: Mesh) -> list[int]:
    """How many sums have started after each backward."""
    model, grads = build(mesh, torch.float32, True, bucket_mb=1e-4)
    found = []
    grads.start(2)
    for micro in rows(torch.float32).chunk(2):
        model(micro).backward()
        found.append(grads._reduction._started)
    grads.finish()
    return found


def test_sums_start_early() -> None:
    for first, second in on_ranks(started, dp=2):
        assert first == 0 and second >= 2


def test_wrong_gradients_are_errors() -> None:
    mesh = Mesh.connect()
    model, grads = build(mesh, torch.float32, taken=True)
    grads.start(1)
    model(rows(torch.float32)).backward()
    with pytest.raises(RuntimeError, match="got gradient number 2, but start"):
        model(rows(torch.float32)).backward()
    grads.start()
    grads.finish()
    with pytest.raises(RuntimeError, match="'first.weight' got a gradient after finish"):
        taker_of(model.first.weight)([(torch.ones(1, 8), torch.ones(1, 6))])
    with pytest.raises(ValueError, match=r"this stage has no learning parameters \['forth'\]"):
        grads.take_products(["forth"])


def test_a_weight_that_is_used_twice_in_one_backward_is_named() -> None:
    mesh = Mesh.connect()
    model, grads = build(mesh, torch.float32, taken=True)
    grads.start(2)
    with pytest.raises(RuntimeError, match="'first.weight': the product .* was already taken"):
        (model.first(rows(torch.float32)) + model.first(rows(torch.float32))).sum().backward()
    grads.start()  # no sum starts early: adding twice is right
    (model.first(rows(torch.float32)) + model.first(rows(torch.float32))).sum().backward()
    twice = grads.finish()["first.weight"].clone()
    grads.start()
    model.first(rows(torch.float32)).sum().backward()
    torch.testing.assert_close(twice, 2 * grads.finish()["first.weight"])


def test_who_takes_products() -> None:
    """Nobody on a CPU unless asked, of what has another dtype, or of an earlier accumulator."""
    mesh = Mesh.connect()
    model, grads = build(mesh, torch.float32, taken=False)
    assert grads.take_products(MATRICES) == [] and taker_of(model.first.weight) is None
    assert grads.take_products([*MATRICES, "scale"], anywhere=True) == MATRICES
    assert taker_of(model.first.weight) is not None
    GradAccumulator(grads.parameters, parameter_layouts(model, mesh.sizes), mesh)
    assert taker_of(model.first.weight) is None
    narrow, grads = build(mesh, torch.bfloat16, taken=False, fp32=False)
    assert grads.take_products(MATRICES, anywhere=True) == []


def taken_over(mesh: Mesh) -> list[str]:
    _, grads = build(mesh, torch.float32, taken=False)
    with mock.patch.object(partition, "PRODUCT_ROWS", 2):
        return grads.take_products(MATRICES, anywhere=True)


def test_ranks_that_own_no_whole_rows_or_too_few_take_gradients() -> None:
    """Three ranks own 16 of the 48 elements of a row of 6; four own two rows, the least here."""
    assert on_ranks(taken_over, dp=3) == [["third.weight"]] * 3  # 8 x 5, a second
    assert on_ranks(taken_over, dp=4) == [["first.weight", "third.weight"]] * 4
