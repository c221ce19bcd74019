"""Hybrid sharding: slices within blocks of data ranks, the same numbers as over all of them.

Blocks of 2 ranks: their sums are branches of the tree that a sum over all ranks is.
"""

from __future__ import annotations

import pytest
import torch
from optim_experts import Net as Experts
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.diagnosis import record
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    MuonConfig,
    SlicedOptimizer,
    clip_,
    decay_groups,
    update_rule,
)

STEPS = 3


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1))


def trained(
    mesh: Mesh, stage: int, shard_ranks: int | None, rule: str, micro: int
) -> dict[str, object]:
    net = model()
    layouts = parameter_layouts(net, mesh.sizes)
    reduce = "micro_batch" if stage > 1 else "step"
    grads = GradAccumulator(
        named_parameters(net), layouts, mesh, reduce=reduce, shard_ranks=shard_ranks, bucket_mb=1e-4
    )
    make = adamw if rule == "adamw" else update_rule(MuonConfig(), layouts)
    optimizer = SlicedOptimizer(grads, make, decay_groups(grads.names, 0.1), stage)
    if stage:
        optimizer.overlap_forward(net)
    norm, norms = GlobalNorm(grads), []
    for step in range(STEPS):
        grads.start(backwards=micro)
        x = torch.randn(24, 5, generator=torch.Generator().manual_seed(step))
        data = mesh["dp", "cp"]
        for own in x.chunk(data.size)[data.rank].chunk(micro):
            (net(own).square().sum() / len(x)).backward()
        slices = grads.finish()
        norms.append(norm(slices).item())
        clip_(slices, 0.1, norm(slices))
        optimizer.step(slices, lr=0.05)
    optimizer.wait_for_parameters()
    state = {
        name: (tensor.numel(), layout.flat) for name, (tensor, layout) in optimizer.state().items()
    }
    return {
        "norms": norms,
        "weights": [p.detach().clone() for p in net.parameters()],
        "elements": sum(n for n, _ in state.values()),
        "tensors": {n: x.clone() for n, (x, _) in optimizer.state().items()},
        "layouts": {n: layout for n, (_, layout) in optimizer.state().items()},
    }


@pytest.mark.gloo(reason="NCCL adds an element in an order that depends on its place")
@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_blocks_of_two_have_the_bits_of_all(stage: int, rule: str) -> None:
    plain = on_ranks(trained, stage, None, rule, 1, dp=4)
    hybrid = on_ranks(trained, stage, 2, rule, 1, dp=4)
    for one, other in zip(plain, hybrid, strict=True):
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-12)  # fp64, other pieces
        pairs = zip(one["weights"], other["weights"], strict=True)
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in pairs)
    first = hybrid[0]["weights"]
    assert all(torch.equal(a, b) for rank in hybrid for a, b in zip(first, rank["weights"]))  # noqa: B905
    assert hybrid[0]["elements"] > 1.8 * plain[0]["elements"]
    for a, b in ((0, 2), (1, 3)):  # replicas
        assert all(torch.equal(x, hybrid[b]["tensors"][n]) for n, x in hybrid[a]["tensors"].items())


def reduced(mesh: Mesh, shard_ranks: int | None, reduce: str) -> dict[str, Tensor]:
    """One gradient, whole, from the slices of a block."""
    net = model()
    layouts = parameter_layouts(net, mesh.sizes)
    grads = GradAccumulator(
        named_parameters(net), layouts, mesh, reduce=reduce, shard_ranks=shard_ranks
    )
    grads.start(backwards=1)
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    data = mesh["dp", "cp"]
    net(x.chunk(data.size)[data.rank]).square().sum().backward()
    return {name: slice_.clone() for name, slice_ in grads.finish().items()}


@pytest.mark.gloo(reason="NCCL adds an element in an order that depends on its place")
@pytest.mark.parametrize("reduce", ["step", "micro_batch"])
@pytest.mark.parametrize(("sizes", "block", "exact"), [
    ({"dp": 4}, 2, True), ({"dp": 2, "cp": 2}, 1, True), ({"dp": 6}, 2, True), ({"dp": 6}, 3, False)
])  # fmt: skip
def test_sums_are_those_over_all_ranks(
    sizes: dict[str, int], block: int, exact: bool, reduce: str
) -> None:
    plain = on_ranks(reduced, None, reduce, **sizes)
    hybrid = on_ranks(reduced, block, reduce, **sizes)
    ranks = block * sizes.get("cp", 1)
    for name in plain[0]:
        want = torch.cat([rank[name] for rank in plain])
        for first in range(0, len(hybrid), ranks):
            got = torch.cat([rank[name] for rank in hybrid[first : first + ranks]])
            assert torch.equal(got, want) if exact else torch.allclose(got, want, rtol=1e-6)


def sent(mesh: Mesh, stage: int, micro: int) -> list[str]:
    """Axes of the communication of the second step."""
    net = model()
    reduce = "micro_batch" if stage > 1 else "step"
    layouts = parameter_layouts(net, mesh.sizes)
    grads = GradAccumulator(named_parameters(net), layouts, mesh, reduce=reduce, shard_ranks=2)
    with record(mesh) as recorder:
        grads.start(backwards=micro)
        for _ in range(micro):
            net(torch.ones(1, 5)).sum().backward()
        grads.finish()
    return [each.ticket.axis for each in recorder.entries]


def test_replicas_are_summed_once_a_step() -> None:
    for stage, micro in ((1, 3), (2, 3)):
        calls = on_ranks(sent, stage, micro, dp=4)[0]
        across = [each for each in calls if each.startswith("dp_cp::2")]
        within = [each for each in calls if each.startswith("dp_cp:2")]
        assert len(across) == 1 and len(within) == (micro if stage > 1 else 1)


def experts(mesh: Mesh, shard_ranks: int | None) -> float:
    net = Experts(mesh)
    grads = GradAccumulator(named_parameters(net), net.layouts, mesh, shard_ranks=shard_ranks)
    own = {name: grads.axis_of(name).size for name in grads.layouts}
    edp, block = mesh["edp"].size, shard_ranks or mesh.sizes["dp"]
    assert own["0.up"] == edp and own["0.mix"] == block
    return 0.0


def test_experts_keep_all_their_ranks() -> None:
    on_ranks(experts, 1, dp=2, tp=2, ep=2)


def refused(mesh: Mesh) -> None:
    net = model()
    layouts = parameter_layouts(net, mesh.sizes)
    with pytest.raises(ValueError, match=r"shard_ranks: 2 was given; it must divide dp \(3\)"):
        GradAccumulator(named_parameters(net), layouts, mesh, shard_ranks=2)


def test_a_block_that_does_not_divide_is_refused() -> None:
    on_ranks(refused, dp=3)
