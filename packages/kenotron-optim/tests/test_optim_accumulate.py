"""Micro-batches add up to the batch, on any number of data ranks and in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator, SlicedOptimizer, Slices, decay_groups

ROWS = 30
"""As many as 1, 2, 3 and 5 data ranks share evenly, and 4 do not."""
TIGHT = {"rtol": 1e-7, "atol": 1e-6}


class Net(nn.Module):
    """Sizes that no number of ranks divides; a frozen parameter, one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(11))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x))) * self.frozen
        return y.square().sum() / ROWS


def rows(step: int = 0) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def build(mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[Net, GradAccumulator]:
    model = Net().to(dtype)
    layouts = parameter_layouts(model, mesh.sizes)
    return model, GradAccumulator(named_parameters(model), layouts, mesh)


def plain(slices: Slices) -> dict[str, list[float]]:
    assert all(slice_.dtype == torch.float32 for slice_ in slices.values())
    return {name: slice_.tolist() for name, slice_ in slices.items()}


def joined(ranks: list[dict[str, list[float]]]) -> dict[str, Tensor]:
    """Whole gradients, flat, from the slices of all data ranks."""
    return {name: torch.tensor([x for rank in ranks for x in rank[name]]) for name in ranks[0]}


def micro_batched(mesh: Mesh) -> list[dict[str, list[float]]]:
    """The gradient of the same batch in 1 to 5 micro-batches."""
    model, grads = build(mesh)
    data = mesh["dp"]
    own = rows().tensor_split(data.size)[data.rank]
    found = []
    for count in range(1, 6):
        grads.start()
        for micro in own.tensor_split(count):
            model(micro).backward()
            assert all(p.grad is None for p in model.parameters())  # freed at once
        found.append(plain(grads.finish()))
    return found


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5])
def test_micro_batches_equal_the_concatenated_batch(dp: int) -> None:
    model = Net()
    model(rows()).backward()
    ranks = on_ranks(micro_batched, dp=dp)
    for k in range(5):
        got = joined([rank[k] for rank in ranks])
        assert not got.pop("unused").any()
        assert set(got) == {"first.weight", "first.bias", "second.weight"}
        for name, gradient in got.items():
            want = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, want.flatten(), **TIGHT)


def left_out_of_a_step(mesh: Mesh) -> dict[str, list[float]]:
    """A step that uses all layers, then one that uses the second alone."""
    model, grads = build(mesh)
    for loss in (model, lambda x: model.second(x.repeat(1, 2)[:, :7]).sum()):
        grads.start()
        loss(rows()).backward()
        slices = grads.finish()
    return plain(slices)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_layer_that_a_step_leaves_out_keeps_nothing_of_the_step_before(dp: int) -> None:
    got = joined(on_ranks(left_out_of_a_step, dp=dp))
    assert got["second.weight"].all()
    assert not got["first.weight"].any() and not got["first.bias"].any()


def half(mesh: Mesh, dtype: torch.dtype, count: int, iterations: int) -> list:
    """Updates of half-precision parameters: gradients and masters of each, and the parameters."""
    model, grads = build(mesh, dtype)
    optimizer = SlicedOptimizer(grads, adamw, decay_groups(grads.names, 0.0), 1)
    found = []
    for step in range(iterations):
        before = [p.clone() for p in model.parameters()]
        grads.start()
        for micro in own_rows(step, mesh["dp"].rank, mesh["dp"].size, dtype).tensor_split(count):
            model(micro).backward()
            assert all(p.grad is None for p in model.parameters())
        slices = grads.finish()
        optimizer.step(slices, 0.01)
        masters = {name: master.tolist() for (name, _), master in optimizer.masters.items()}
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert moved == [name not in ("frozen", "unused") for name, _ in model.named_parameters()]
        values = {n: p.float().flatten().tolist() for n, p in model.named_parameters()}
        found.append((plain(slices), masters, values))
    return found


def own_rows(step: int, rank: int, dp: int, dtype: torch.dtype) -> Tensor:
    return rows(step).tensor_split(dp)[rank].to(dtype)


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, foreach=False)


def by_hand(dtype: torch.dtype, count: int, iterations: int, dp: int) -> list:
    """The same on one process: half-precision gradients added in fp32, rank after rank."""
    model = Net().to(dtype)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().requires_grad_() for name, p in learning.items()}
    optimizer = adamw([{"params": list(masters.values()), "weight_decay": 0.0}])
    optimizer.param_groups[0]["lr"] = 0.01
    found = []
    for step in range(iterations):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for rank in range(dp):
            own = {name: torch.zeros_like(master) for name, master in masters.items()}
            for micro in own_rows(step, rank, dp, dtype).tensor_split(count):
                model.zero_grad()
                model(micro).backward()
                for name, p in learning.items():
                    own[name] += 0 if p.grad is None else p.grad.float()
            for name in sums:
                sums[name] += own[name]
        for name, master in masters.items():
            master.grad = sums[name].clone()
        optimizer.step()
        for name, p in learning.items():
            p.data.copy_(masters[name])
        values = {n: p.detach().float().flatten() for n, p in model.named_parameters()}
        copies = {n: m.detach().clone().flatten() for n, m in masters.items()}
        found.append(({n: s.flatten() for n, s in sums.items()}, copies, values))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "iterations"), [(1, 3), (10, 1), (10, 3)])
def test_half_precision_is_added_and_updated_in_fp32(
    dtype: torch.dtype, count: int, iterations: int
) -> None:
    want = by_hand(dtype, count, iterations, dp=2)
    ranks = on_ranks(half, dtype, count, iterations, dp=2)
    for step in range(iterations):
        gradients, masters, values = want[step]
        for name, gradient in joined([rank[step][0] for rank in ranks]).items():
            assert torch.equal(gradient, gradients[name]), name  # bit for bit
        for name, master in joined([rank[step][1] for rank in ranks]).items():
            torch.testing.assert_close(master, masters[name], **TIGHT)
        assert ranks[0][step][2] == ranks[1][step][2]
        for name, value in ranks[0][step][2].items():
            # a master that differs in its last bit may round to the next half-precision number
            torch.testing.assert_close(torch.tensor(value), values[name], rtol=1e-2, atol=1e-5)
