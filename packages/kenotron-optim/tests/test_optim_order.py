"""Ranks start their sums in one order, also where a parameter got no gradient on one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kenotron_dist import Mesh, RankError
from kenotron_dist.autograd import all_gather_from, reduce_scatter_to
from kenotron_dist.diagnosis import record
from kenotron_dist.placement import Partial, Shard, named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator
from kenotron_optim.config import Reduce


class Two(nn.Module):
    """A norm whose gradient is partial over tp, and a weight that one data rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))
        self.placements = {"norm": (Partial("tp"),)}


def operations(mesh: Mesh) -> list[str]:
    """Axes of this rank's communications, in order."""
    module = Two()
    layouts = parameter_layouts(module, mesh.sizes)
    grads = GradAccumulator(named_parameters(module), layouts, mesh)
    with record(mesh) as recorder:
        grads.start(1)
        uses = mesh["dp"].rank == 0
        y = module.norm @ module.weight if uses else module.norm * 2
        y.sum().backward()
        grads.finish()
        return [str(entry.ticket.axis) for entry in recorder.entries]


@pytest.mark.parametrize("backend", ["gloo", "fake_nccl"])
def test_a_parameter_without_a_gradient_changes_no_order(backend: str) -> None:
    ranks = on_ranks(operations, dp=2, tp=2, backend=backend)
    assert all(axes == ranks[0] for axes in ranks)
    assert ranks[0] == ["dp_cp", "tp/1", "dp_cp"]


class Experts(nn.Module):
    """Experts that see the tokens of their ep group, and a scale before them, partial over tp."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.ep = mesh["ep"]
        self.scale = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4 // mesh.axis_sizes["ep"], 4))
        self.placements = {"scale": Partial("tp"), "weight": Shard("ep", 0)}

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        tokens = all_gather_from(x * self.scale, self.ep)
        out = tokens * self.weight.sum(0) if uses else tokens * 2
        return reduce_scatter_to(out, self.ep)


def with_experts(mesh: Mesh, irregular: tuple[str, ...] | None) -> tuple[list[str], list[bool]]:
    """Axes of this rank's communications in order; whether its experts had a gradient."""
    net = nn.Sequential(Experts(mesh), Experts(mesh), Experts(mesh))
    layouts = parameter_layouts(net, mesh.axis_sizes)
    grads = GradAccumulator(
        named_parameters(net), layouts, mesh, bucket_mb=1e-6, irregular=irregular
    )
    with record(mesh) as recorder:
        grads.start(1)
        x = torch.ones(2, 4)
        for i, layer in enumerate(net):  # the last rank has no tokens for some experts
            x = layer(x, uses=i == 0 or mesh.rank < mesh.world.size - 1)
        x.sum().backward()
        used = [grads._counts[f"{i}.weight"] == 1 for i in range(3)]
        slices = grads.finish()
        assert all(slices[f"{i}.weight"].any() for i in range(3))
        return [str(entry.ticket.axis) for entry in recorder.entries], used


@pytest.mark.parametrize("backend", ["gloo", "fake_nccl"])
@pytest.mark.parametrize("sizes", [{"dp": 4, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2}], ids=str)
def test_experts_without_tokens_change_no_order(sizes: dict[str, int], backend: str) -> None:
    ranks = on_ranks(with_experts, None, **sizes, backend=backend, seconds=30)
    assert ranks[-1][1] == [True, False, False] and all(all(used) for _, used in ranks[:-1])
    assert all(axes == ranks[0][0] for axes, _ in ranks)
    assert "ep" not in ranks[0][0][ranks[0][0].index("edp") :]  # after the backward


def test_a_sum_that_starts_in_the_backward_would_change_the_order() -> None:
    """What ``irregular`` is for; on gloo such ranks would wait for one another."""
    ranks = on_ranks(with_experts, (), dp=4, ep=2, backend="fake_nccl", seconds=30)
    assert ranks[0][0] != ranks[-1][0]


class Forks(nn.Module):
    """A layer that reads one of two weights of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x + (self.second(x) if which else self.first(x))


def forked(mesh: Mesh, reduce: Reduce, apart: tuple[bool, ...]) -> list[dict[str, torch.Tensor]]:
    """Slices of each step; in some the data ranks read different weights."""
    torch.manual_seed(0)
    model = nn.ModuleList(Forks() for _ in range(3))
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=1e-6, reduce=reduce)
    found = []
    for differ in apart:
        grads.start(backwards=2)
        for micro in range(2):
            x = torch.full((2, 4), 1.0 + mesh.rank)
            for i, layer in enumerate(model):
                x = layer(x, (i + micro + (mesh.rank if differ else 0)) % 2)
            x.sum().backward()
        found.append({name: each.clone() for name, each in grads.finish().items()})
    return found


def test_slices_of_each_backward_start_in_one_order_too() -> None:
    """As with whole gradients, where one rank uses what another one does not."""
    apart = False, True, False, True
    for kept, whole in zip(
        on_ranks(forked, "micro_batch", apart, dp=2),
        on_ranks(forked, "step", apart, dp=2),
        strict=True,
    ):
        for step, expected in zip(kept, whole, strict=True):
            assert step.keys() == expected.keys()
            for name, sums in expected.items():
                torch.testing.assert_close(step[name], sums)


def test_a_first_step_of_another_order_is_refused() -> None:
    message = "ranks 0 and 1 of the same dp_cp got gradients in different orders, '"
    with pytest.raises(RankError, match=message):
        on_ranks(forked, "micro_batch", (True,), dp=2)
