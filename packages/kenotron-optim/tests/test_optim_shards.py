"""ZeRO stages 2 and 3 against stages 0 and 1: the same bits, and the memory that is promised."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Mesh
from kenotron_dist.placement import Tie, named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, clip_, decay_groups

WIDTH, STEPS = 10, 4


class Layer(nn.Module):
    """A residual block with a parameter that is smaller than d, and one that is frozen."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.gain * self.fixed


class Table(nn.Module):
    """An embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class LateHead(nn.Module):
    """Hands on what it is given: the loss reads its weight, which is the embedding's."""

    def __init__(self, table: Table, tied: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach() if tied else torch.randn(7, WIDTH))
        if tied:
            self.placements = {"weight": Tie("table.weight")}

    def forward(self, x: Tensor) -> Tensor:
        return x


class Net(nn.Module):
    """A list of modules whose last one is used outside of it."""

    def __init__(self, *, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = Table()
        self.layers = nn.ModuleList(Layer(again) for _ in range(3))
        self.head = LateHead(self.table, tied)

    @property
    def units(self) -> list[nn.Module]:
        return [self.table, *self.layers, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for unit in self.units:
            x = unit(x)
        return nn.functional.cross_entropy(x @ self.head.weight.t(), tokens, reduction="sum")


def build(
    mesh: Mesh, stage: int, *, dtype: torch.dtype = torch.float32, reduce: str = "", **how: Any
) -> tuple[Net, GradAccumulator, SlicedOptimizer]:
    regather, fp32 = how.pop("regather", "layer"), how.pop("fp32", True)
    model = Net(**how).to(dtype)
    if how.get("tied"):
        model.head.weight.data = model.table.weight.data
    layouts = parameter_layouts(model, mesh.sizes)
    kept = reduce or ("micro_batch" if stage > 1 else "step")
    grads = GradAccumulator(
        named_parameters(model), layouts, mesh, reduce=kept, fp32=fp32, bucket_mb=0.001
    )
    optimizer = SlicedOptimizer(
        grads,
        lambda g: torch.optim.AdamW(g, foreach=False),
        decay_groups(grads.names, 0.1, exclude=[".*gain"]),
        stage,
        regather=regather,
    )
    optimizer.overlap_forward(model.units)
    return model, grads, optimizer


def data(mesh: Mesh, step: int, micros: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(100 * step + mesh["dp"].rank)
    return (torch.randint(7, (5,), generator=draw) for _ in range(micros))


def train(mesh: Mesh, stage: int, micros: int, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of each step, an evaluation between them; all parameters."""
    model, grads, optimizer = build(mesh, stage, **how)
    norm, found = GlobalNorm(grads), []
    for step in range(STEPS):
        grads.start(backwards=micros)
        for tokens in data(mesh, step, micros):
            loss = model(tokens)
            loss.backward()
            found.append(loss.item())
        slices = grads.finish()
        found.append(norm(slices).item())
        clip_(slices, 5.0, norm(slices))
        optimizer.step(slices, lr=0.05)
        with torch.no_grad():
            found.append(model(torch.arange(7)).item())
    optimizer.wait_for_parameters()
    return found, {path: p.detach().clone() for path, p in model.named_parameters()}


Stages = list[tuple[int, dict[str, Any]]]


def stages(mesh: Mesh, others: Stages, micros: int, how: dict[str, Any]) -> list:
    return [train(mesh, stage, micros, **how, **more) for stage, more in others]


def assert_equal(ranks: list) -> None:
    for (losses, whole), *others in ranks:
        assert losses[-1] < losses[1]
        for other, parameters in others:
            assert other == losses
            assert all(torch.equal(parameters[path], x) for path, x in whole.items())


STAGES = [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"regather": "step"})]
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "bf16": {"dtype": torch.bfloat16},
    "bf16, own sums, computed again": {"dtype": torch.bfloat16, "fp32": False, "again": True},
}


@pytest.mark.gloo(reason="NCCL adds an element in an order that depends on its place")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_every_stage_has_the_same_bits_with_one_micro_batch(dp: int, case: str) -> None:
    assert_equal(on_ranks(stages, STAGES, 1, CASES[case], dp=dp))


@pytest.mark.gloo(reason="NCCL adds an element in an order that depends on its place")
@pytest.mark.parametrize("case", ["tied", "bf16"])
def test_with_whole_gradients_it_has_them_with_several(case: str) -> None:
    kept = [(stage, {"reduce": "step", **more}) for stage, more in STAGES]
    assert_equal(on_ranks(stages, kept, 3, CASES[case], dp=2))


def test_slices_of_several_micro_batches_differ_by_rounding() -> None:
    for (losses, whole), *others in on_ranks(stages, STAGES, 3, {}, dp=3):
        for other, parameters in others[1:]:
            assert other == pytest.approx(losses, rel=5e-6, abs=1e-6)
            for path, x in whole.items():
                torch.testing.assert_close(parameters[path], x, rtol=1e-4, atol=1e-5)


def bytes_of(tensors: Any) -> int:
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def held(mesh: Mesh, stage: int, regather: str, tied: bool = False) -> dict[str, Any]:
    """Bytes of parameters and gradients at the end of a step and at most within it."""
    model, grads, optimizer = build(mesh, stage, regather=regather, tied=tied)
    learning = [p for p in model.parameters() if p.requires_grad]
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, bytes_of(learning))

    for unit in model.units:
        unit.register_forward_pre_hook(look)
        for parameter in unit.parameters():
            if parameter.requires_grad:
                parameter.register_hook(look)
    grads.start(backwards=2)
    for tokens in data(mesh, 0, 2):
        model(tokens).backward()
    between = bytes_of(learning)
    optimizer.step(grads.finish(), lr=0.1)
    gradients = [buffer for buffer in grads.buffers if not buffer.is_meta] + grads.slice_sums
    gradients += grads._seconds.values()
    return {
        "most": most,
        "between": between,
        "after": bytes_of(learning),
        "gradients": bytes_of(gradients),
        "units": [
            4 * sum(p.numel() for p in u.parameters() if p.requires_grad) for u in model.units
        ],
    }


def test_memory_is_that_of_slices_and_two_units() -> None:
    ranks = [on_ranks(held, stage, way, dp=2)[0] for stage, way in
             [(1, "layer"), (2, "layer"), (3, "layer"), (3, "step")]]  # fmt: skip
    one, two, three, step = ranks
    whole = sum(one["units"])
    assert one["after"] == one["most"] == two["after"] == whole
    assert one["gradients"] >= whole and whole / 2 <= two["gradients"] < 0.52 * whole
    assert three["after"] == three["between"] == 0 and step["after"] == 0
    pairs = zip(three["units"], three["units"][1:], strict=False)
    assert three["most"] == max(a + b for a, b in pairs)
    assert step["most"] == step["between"] == whole


def test_of_tied_parameters_of_a_stage_slices_are_kept() -> None:
    one, two = (on_ranks(held, stage, "layer", True, dp=2)[0] for stage in (1, 2))
    whole = sum(one["units"][:-1])
    assert one["gradients"] >= whole + one["units"][-1]  # each owner has a buffer
    assert whole / 2 <= two["gradients"] < 0.52 * whole


def resumed(mesh: Mesh, first: int, then: int, dtype: torch.dtype) -> bool:
    """Continue from the state of another stage: as if nothing had happened."""
    model, grads, optimizer = build(mesh, first, dtype=dtype)
    step_once(mesh, model, grads, optimizer, 0)
    saved = {name: tensor.clone() for name, (tensor, _) in optimizer.state().items()}
    other, its_grads, its_optimizer = build(mesh, then, dtype=dtype)
    for tensor, layout in its_optimizer.wanted().values():
        if layout.name in saved and saved[layout.name].shape == tensor.shape:
            tensor.copy_(saved[layout.name])
    its_optimizer.steps = optimizer.steps
    its_optimizer.publish()
    step_once(mesh, model, grads, optimizer, 1)
    step_once(mesh, other, its_grads, its_optimizer, 1)
    for each in (optimizer, its_optimizer):
        each.wait_for_parameters()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def step_once(
    mesh: Mesh, model: Net, grads: GradAccumulator, optimizer: SlicedOptimizer, step: int
) -> None:
    grads.start(backwards=1)
    for tokens in data(mesh, step, 1):
        model(tokens).backward()
    optimizer.step(grads.finish(), lr=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 2), (2, 1), (3, 3)])
def test_any_stage_goes_on_from_any_other(first: int, then: int, dtype: torch.dtype) -> None:
    assert all(on_ranks(resumed, first, then, dtype, dp=2))


def loaded(mesh: Mesh) -> list[float]:
    """Values that are written into slices, and into whole parameters."""
    model, _, optimizer = build(mesh, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="parameters have no memory; write into parameter_slic"):
        optimizer.reload()
    for tensor, _ in optimizer.parameter_slices().values():
        tensor.fill_(2.0)
    optimizer.reload()
    optimizer.wait_for_parameters()
    found = [model.layers[1].up.weight.float().mean().item()]
    for parameter in model.parameters():
        parameter.data.fill_(3.0)
    optimizer.reload()
    optimizer.wait_for_parameters()
    copied = copy.deepcopy(model)
    found.append(copied.layers[2].down.weight.float().mean().item())
    optimizer.publish()
    loss = copied(torch.arange(7))  # needs no hook
    return [*found, loss.item() - model(torch.arange(7)).item()]


def test_values_are_loaded_into_slices_or_parameters_and_copies_are_whole() -> None:
    assert on_ranks(loaded, dp=2) == [[2.0, 3.0, 0.0]] * 2


def refused(mesh: Mesh) -> None:
    model = Net()
    layouts = parameter_layouts(model, mesh.sizes)
    sliced = GradAccumulator(named_parameters(model), layouts, mesh, reduce="micro_batch")
    groups = decay_groups(sliced.names, 0.0)
    with pytest.raises(
        ValueError, match="ZeRO stage 0 gathers gradients, of which the accumulator"
    ):
        SlicedOptimizer(sliced, torch.optim.SGD, groups, 0)
    with pytest.raises(ValueError, match="ZeRO stage 4 is not available: choose 0, 1, 2 or 3"):
        SlicedOptimizer(sliced, torch.optim.SGD, groups, 4)
    with pytest.raises(ValueError, match="zeroed=True keeps whole gradients"):
        sliced.start(zeroed=True)
    optimizer = SlicedOptimizer(sliced, torch.optim.SGD, groups, 3)
    for whole in (model, nn.ModuleDict({"a": model})):
        with pytest.raises(ValueError, match="(Net|ModuleDict) is no list of modules: give"):
            optimizer.overlap_forward(whole)
    with pytest.raises(ValueError, match="belong to none of the 4 modules given"):
        optimizer.overlap_forward(model.units[:-1])
    model.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"Layer.compile\(\) makes hooks a part of the program"):
        optimizer.overlap_forward(model.units)
    model = Net()
    model.table.weight.data = torch.randn(9, WIDTH)[:7]
    layouts = parameter_layouts(model, mesh.sizes)
    sliced = GradAccumulator(named_parameters(model), layouts, mesh)
    optimizer = SlicedOptimizer(sliced, torch.optim.SGD, decay_groups(sliced.names, 0.0), 3)
    with pytest.raises(ValueError, match="'table.weight' is a part of a larger memory"):
        optimizer.overlap_forward(model.units)
    model.table.weight.data = torch.randn(7, WIDTH)
    optimizer.overlap_forward(model.units)
    with pytest.raises(ValueError, match="the modules have been named, and parameters were cut"):
        optimizer.overlap_forward(model.units)


def test_what_cannot_be_is_refused() -> None:
    on_ranks(refused, dp=2)
