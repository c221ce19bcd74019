"""Replicas that differ are found on every axis, and only then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kenotron_dist import Mesh, RankError, spawn
from kenotron_dist.diagnosis import check_replicas
from kenotron_dist.diagnosis.replica_check import bit_sums
from kenotron_dist.placement import Shard, Tie, named_parameters, parameter_layouts


class Model(nn.Module):
    """A replicated, a cut and a tied parameter."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(5))
        self.cut = nn.Parameter(torch.full((3,), float(tp)))
        self.placements = {"cut": Shard("tp", 0)}
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        for layer in (self.first, self.last):
            layer.weight.data.fill_(2.0)
            layer.placements = {"weight": Tie("shared")}


def compare(mesh: Mesh, spoil: str | None) -> None:
    model = Model(mesh["tp"].rank)
    stage = lambda name: int(name.startswith("last"))  # noqa: E731
    layouts = parameter_layouts(model, mesh.sizes, stage)
    own = {n: p for n, p in named_parameters(model).items() if stage(n) == mesh["pp"].rank}
    if mesh.rank == 3 and spoil in own:
        own[spoil].data[0] += 1e-6
    check_replicas(own, layouts, mesh)


def test_equal_replicas_pass() -> None:
    spawn(compare, None, pp=2, tp=2)
    spawn(compare, None, pp=2, dp=2)


@pytest.mark.parametrize(
    ("spoil", "sizes", "where"),
    [
        ("last.weight", {"pp": 2, "dp": 2}, "over dp_cp .ranks 2, 3. differ, first 'last.weight'"),
        ("last.weight", {"pp": 2, "tp": 2}, "over tp .ranks 2, 3. differ, first 'last.weight'"),
        ("norm", {"dp": 4, "pp": 2}, "over dp_cp .* first 'norm' .on rank 3."),
    ],
)
def test_a_differing_replica_is_named(spoil: str, sizes: dict, where: str) -> None:
    with pytest.raises(RankError, match=f"1 of .* {where}: were all ranks given the same seed"):
        spawn(compare, spoil, **sizes)


def spoilt_tie(mesh: Mesh) -> None:
    model = Model(0)
    stage = lambda name: int(name.startswith("last"))  # noqa: E731
    layouts = parameter_layouts(model, mesh.sizes, stage)
    own = {n: p for n, p in named_parameters(model).items() if stage(n) == mesh["pp"].rank}
    if mesh.rank:
        own["last.weight"].data[0] += 1
    check_replicas(own, layouts, mesh)


def test_a_tie_that_has_come_apart_is_named() -> None:
    with pytest.raises(RankError, match=r"must be equal over pp.* \(ranks 0, 1\) differ"):
        spawn(spoilt_tie, pp=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_checksum_sees_one_bit_and_one_exchange(dtype: torch.dtype) -> None:
    x = torch.arange(1, 8).to(dtype)
    assert torch.equal(bit_sums(x), bit_sums(x.clone()))
    y, z = x.clone(), x.clone()
    y[3] += 1
    z[[2, 3]] = x[[3, 2]]
    assert not torch.equal(bit_sums(x), bit_sums(y))
    assert not torch.equal(bit_sums(x), bit_sums(z))
