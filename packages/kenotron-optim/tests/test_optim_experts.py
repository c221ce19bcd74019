"""Experts cut over ep train as on one process: gradients, norms, clipping, slices, parameters."""

from __future__ import annotations

import pytest
import torch
from optim_experts import E, Net, batch, whole_tensors
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.diagnosis import check_replicas
from kenotron_dist.placement import Shard, TensorLayout, named_parameters
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, clip_, decay_groups
from kenotron_optim.bucket_order import order_buckets

STEPS, BOUND = 4, 0.05
LAYOUTS = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4},
    {"dp": 2, "cp": 2, "ep": 4},
]
Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses, norms of the gradient before clipping, parameters."""


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-6)


def train(mesh: Mesh, stage: int, norm_type: float = 2.0) -> Trained:
    """Train on this rank; returns its own part of each loss, and of each parameter."""
    net = Net(mesh)
    grads = GradAccumulator(named_parameters(net), net.layouts, mesh, bucket_mb=1e-4)
    norm = GlobalNorm(grads, norm_type)
    groups = decay_groups(grads.names, 0.1, [r".*\.bias"])
    optimizer = SlicedOptimizer(grads, adamw, groups, stage)
    losses, norms = [], []
    for step in range(STEPS):
        grads.start(1)
        loss = net.loss(*batch(step, mesh))
        loss.backward()
        slices = grads.finish()
        norms.append(norm(slices).item())
        clip_(slices, BOUND, norm(slices))
        optimizer.step(slices, lr=0.02)
        losses.append(loss.item())
    optimizer.wait_for_parameters()
    check_replicas(named_parameters(net), net.layouts, mesh)
    found: dict[str, Tensor] = {}
    whole_tensors(net, mesh, found)
    return losses, norms, found


def plain(norm_type: float = 2.0) -> Trained:
    """The same on one process, with nothing but torch."""
    mesh = Mesh.connect()
    net = Net(mesh)
    named = named_parameters(net)
    decayed = [p for name, p in named.items() if not name.endswith("bias")]
    free = [p for name, p in named.items() if name.endswith("bias")]
    optimizer = adamw(
        [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    )
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net.loss(*batch(step, mesh))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), BOUND, norm_type).item())
        optimizer.step()
        losses.append(loss.item())
    assert min(norms) > BOUND  # every step is clipped
    return losses, norms, {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_experts_train_as_on_one_process(sizes: dict[str, int]) -> None:
    losses, norms, parameters = plain()
    stages = [on_ranks(train, stage, **sizes) for stage in (0, 1)]
    for ranks in stages:
        summed = [sum(own) for own in zip(*(rank[0] for rank in ranks), strict=True)]
        assert summed == pytest.approx(losses, rel=1e-6)
        assert all(rank[1] == ranks[0][1] for rank in ranks)
        assert ranks[0][1] == pytest.approx(norms, rel=1e-6)
        for name, want in parameters.items():
            got = torch.full_like(want, torch.nan)
            for _, _, held in ranks:
                got = torch.where(held[name].isnan(), got, held[name])
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=name)
    for one, other in zip(*stages, strict=True):  # ZeRO stages agree bit for bit
        assert one[:2] == other[:2]
        assert all(torch.equal(a.nan_to_num(), other[2][n].nan_to_num()) for n, a in one[2].items())


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms_count_each_element_of_an_expert_once(norm_type: float) -> None:
    norms = plain(norm_type)[1]
    for rank in on_ranks(train, 1, norm_type, dp=2, tp=2, ep=2):
        assert rank[1] == pytest.approx(norms, rel=1e-6)


def buckets(mesh: Mesh) -> tuple[list[tuple[str, ...]], dict[str, tuple[str, int]]]:
    """Axes of the buckets, and for each tensor the axis that reduces it and its elements here."""
    net = Net(mesh)
    grads = GradAccumulator(named_parameters(net), net.layouts, mesh)
    spans = {span.name: span.numel for _, span in grads.spans()}
    axes = {name: (grads.axis_of(name).name, grads.axis_of(name).size) for name in spans}
    assert spans["0.up"] == E // mesh.axis_sizes["ep"] * 30
    return [bucket.axes for bucket in grads.buckets], axes


def test_a_bucket_is_reduced_over_the_axes_of_its_grid() -> None:
    for sizes, ranks in (({"dp": 2, "tp": 2, "ep": 2}, 2), ({"dp": 2, "tp": 2}, 4)):
        order, axes = on_ranks(buckets, **sizes)[0]
        assert set(order) == {("dp", "cp"), ("edp",)}
        assert axes["1.mix"] == axes["0.router"] == ("dp_cp", 2)
        assert axes["0.up"] == axes["1.bias"] == ("edp", ranks)


def test_buckets_of_both_grids_are_in_the_order_in_which_they_are_ready() -> None:
    tensors = {name: torch.zeros(100) for name in ("d4", "e3", "d3", "e2", "d2", "d1")}
    layouts = {
        name: TensorLayout(name, (100,), (Shard("ep", 0),) if name[0] == "e" else ())
        for name in tensors
    }
    for cap_mb, due in (
        (1e-4, ["d4", "e3", "d3", "e2", "d2", "d1"]),
        (8e-4, ["d4 d3", "e3 e2", "d2 d1"]),  # two in a bucket; e2 is ready after d3
    ):
        for late in ((), ("d4",)):
            found = order_buckets(tensors, layouts, Mesh.connect(), late, cap_mb)
            names = [" ".join(span.name for span in bucket.spans) for bucket in found]
            assert names[-1] == "d4" if late else names == due
            assert all((b.axes == ("edp",)) == (b.spans[0].name[0] == "e") for b in found)
