"""From backwards to updated parameters, against torch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, RankError
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, clip_, decay_groups

ROWS = 12


class Net(nn.Module):
    """Awkward sizes: fewer elements than ranks, primes, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5]))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(11))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)) * self.scale[0])
        return (y * self.scale[1]).square().sum() / ROWS


def data(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def adamw(groups: list[dict], fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused, foreach=False)


def fused_adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return adamw(groups, fused=True)


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)


def sliced(
    mesh: Mesh, stage: int, steps: int, make, microbatches: int = 2, bucket_mb: float = 25
) -> tuple[list[float], list[list[float]]]:
    """Norms and final parameters after some clipped steps."""
    model = Net()
    grads = GradAccumulator(
        named_parameters(model), parameter_layouts(model, mesh.sizes), mesh, bucket_mb=bucket_mb
    )
    norm = GlobalNorm(grads)
    groups = decay_groups(grads.names, 0.1, [r".*\.bias", "scale"])
    optimizer = SlicedOptimizer(grads, make, groups, stage)
    norms = []
    for step in range(steps):
        own = data(step).chunk(mesh["dp"].size)[mesh["dp"].rank]
        grads.start()
        for rows in own.chunk(microbatches):
            model(rows).backward()
        slices = grads.finish()
        norms.append(norm(slices).item())
        clip_(slices, 0.5, norm(slices))
        optimizer.step(slices, lr=0.05 / (step + 1))
    assert all(p.grad is None for p in model.parameters())
    return norms, [p.flatten().tolist() for p in model.parameters()]


def plain(steps: int, make) -> tuple[list[float], list[list[float]]]:
    """The same with nothing but torch."""
    model = Net()
    decayed = [model.first.weight, model.second.weight, model.unused]
    free = [model.first.bias, model.scale]
    optimizer = make(
        [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    )
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step)).backward()
        model.unused.grad = torch.zeros_like(model.unused)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (step + 1)
        optimizer.step()
    return norms, [p.flatten().tolist() for p in model.parameters()]


def close(got: tuple, want: tuple) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    for a, b in zip(got[1], want[1], strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_steps_equal_torch_and_stages_equal_one_another(dp: int, make) -> None:
    stage0, stage1 = (on_ranks(sliced, s, 5, make, dp=dp) for s in (0, 1))
    assert all(rank == stage0[0] for rank in [*stage0, *stage1])  # bit for bit
    close(stage0[0], plain(5, make))


@pytest.mark.gloo(reason="NCCL adds an element in an order that depends on its place")
def test_the_size_of_buckets_changes_no_bit() -> None:
    one, two = (on_ranks(sliced, 1, 4, adamw, 2, mb, dp=3)[0] for mb in (25, 1e-4))
    assert one == two


def halves(mesh: Mesh, fp32: bool) -> float:
    """256 plus many ones in bf16: only fp32 buffers can count them."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, fp32=fp32)
    grads.start()
    for value in [256.0, *[1.0] * 20]:
        model(torch.tensor([[value]], dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is None
    return grads.finish()["weight"].item()


def test_gradients_of_half_precision_are_added_in_fp32() -> None:
    assert on_ranks(halves, True) == [276.0]
    assert on_ranks(halves, False) == [256.0]


def saved_and_restored(mesh: Mesh, stage: int) -> bool:
    """A fresh optimizer filled with another's state goes on exactly like it."""

    def build() -> tuple[Net, GradAccumulator, SlicedOptimizer]:
        model = Net()
        layouts = parameter_layouts(model, mesh.sizes)
        grads = GradAccumulator(named_parameters(model), layouts, mesh)
        return model, grads, SlicedOptimizer(grads, adamw, decay_groups(grads.names, 0.1), stage)

    def step(model: Net, grads: GradAccumulator, optimizer: SlicedOptimizer, i: int) -> None:
        grads.start()
        model(data(i).chunk(mesh["dp"].size)[mesh["dp"].rank]).backward()
        optimizer.step(grads.finish(), 0.1)

    one, two = build(), build()
    for i in range(3):
        step(*one, i)
    two[2].prepare()
    source = one[2].wanted()
    for key, (tensor, layout) in two[2].wanted().items():
        tensor.copy_(source[key][0])
        assert layout == source[key][1]
    two[2].steps = one[2].steps
    assert two[2].steps == 3
    two[2].publish()
    for i in range(3, 5):
        step(*one, i)
        step(*two, i)
    pairs = zip(one[0].parameters(), two[0].parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.smoke
@pytest.mark.parametrize("stage", [0, 1])
def test_state_written_into_a_fresh_optimizer_continues_exactly(stage: int) -> None:
    assert all(on_ranks(saved_and_restored, stage, dp=2))


def records(mesh: Mesh, stage: int) -> list[tuple[str, tuple, tuple]]:
    model = Net()
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh)
    optimizer = SlicedOptimizer(grads, adamw, decay_groups(grads.names, 0.1), stage)
    optimizer.prepare()
    found = optimizer.state()
    return [(key, layout.shape, layout.placement) for key, (_, layout) in found.items()]


def test_both_stages_describe_the_same_records() -> None:
    zero, one = (on_ranks(records, stage, dp=3) for stage in (0, 1))
    assert [sorted(map(str, rank)) for rank in zero] == [sorted(map(str, rank)) for rank in one]
    assert any(name == "optimizer.exp_avg.first.weight" for name, _, _ in one[0])


def tiny(mesh: Mesh, stage: int) -> tuple[float, int]:
    """Fewer elements than data ranks: some own nothing."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    optimizer = SlicedOptimizer(grads, adamw, decay_groups(grads.names, 0.0), stage)
    optimizer.prepare()
    grads.start()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step(grads.finish(), 0.25)
    return model.weight.item(), optimizer.steps


def test_a_rank_may_own_nothing() -> None:
    for stage in (0, 1):
        ranks = on_ranks(tiny, stage, dp=3)
        assert len(set(ranks)) == 1 and ranks[0][1] == 1


def no_layout(mesh: Mesh) -> None:
    GradAccumulator(named_parameters(Net()), {}, mesh)


def no_group(mesh: Mesh) -> None:
    model = Net()
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    SlicedOptimizer(grads, adamw, decay_groups(["scale"], 0.1))


def bad_stage(mesh: Mesh) -> None:
    sliced(mesh, 4, 1, adamw)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_layout, "no layout for parameters .*first.weight"),
        (no_group, "parameters .*first.bias.* are in no group"),
        (bad_stage, "ZeRO stage 4 is not available: choose 0, 1, 2 or 3"),
    ],
)
def test_errors_are_sentences(function, message: str) -> None:
    with pytest.raises(RankError, match=message):
        on_ranks(function)


def test_groups_of_weight_decay() -> None:
    groups = decay_groups(["a.bias", "a.weight", "b.bias.x"], 0.1, [r".*\.bias"])
    assert [(g.names, g.weight_decay) for g in groups] == [
        (("a.weight", "b.bias.x"), 0.1),
        (("a.bias",), 0.0),
    ]
    assert len(decay_groups(["a"], 0.1)) == 1


def test_a_pattern_that_names_no_parameter() -> None:
    with pytest.raises(ValueError, match="'nrm.weight', which shall.* such as 'norm.weight'"):
        decay_groups(["a.bias", "norm.weight"], 0.1, ["nrm.weight"])
