"""From backwards to updated parameters, against torch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import (
    Chunk,
    Mesh,
    Partial,
    RankError,
    Shard,
    Tie,
    named_parameters,
    parameter_layouts,
    spawn,
    tie_storages,
)
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, clip_, decay_groups

PRELOAD = ("torch._dynamo",)
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
    stage0, stage1 = (spawn(sliced, s, 5, make, dp=dp, preload=PRELOAD) for s in (0, 1))
    assert all(rank == stage0[0] for rank in [*stage0, *stage1])  # bit for bit
    close(stage0[0], plain(5, make))


def test_the_size_of_buckets_changes_no_bit() -> None:
    one, two = (spawn(sliced, 1, 4, adamw, 2, mb, dp=3, preload=PRELOAD)[0] for mb in (25, 1e-4))
    assert one == two


class Tied(nn.Module):
    """One matrix used twice through two leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        for layer in (self.a, self.b):
            layer.placements = {"weight": Tie("shared")}
        tie_storages(self)


def tied_step(mesh: Mesh) -> tuple[float, list[float]]:
    """Both owners on one stage, or each on its own."""
    model = Tied()
    layouts = parameter_layouts(
        model, mesh.sizes, lambda name: int(name[0] == "b") * (mesh["pp"].size - 1)
    )
    own = named_parameters(model)
    if mesh["pp"].size > 1:
        own = {n: p for n, p in own.items() if n.startswith("ab"[mesh["pp"].rank])}
    grads = GradAccumulator(own, layouts, mesh)
    optimizer = SlicedOptimizer(grads, adamw, decay_groups(grads.names, 0.1))
    grads.start()
    for name, p in own.items():
        (p * data(3)[:6].repeat(1, 2)[:, :6] * (2 if name[0] == "a" else 3)).sum().backward()
    slices = grads.finish()
    norm = GlobalNorm(grads)(slices).item()
    optimizer.step(slices, 0.1)
    return norm, next(iter(own.values())).flatten().tolist()


def test_tied_parameters_are_one_element_on_one_stage_and_on_two() -> None:
    [want] = spawn(tied_step, preload=PRELOAD)
    weight = Tied().a.weight
    (weight * data(3)[:6].repeat(1, 2)[:, :6] * 5).sum().backward()
    assert want[0] == pytest.approx(weight.grad.norm().item(), rel=1e-6)
    assert spawn(tied_step, pp=2, preload=PRELOAD) == [want, want]


class Cut(nn.Module):
    """A weight of two chunks, the second with one part for all ranks, and a partial norm."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        whole = torch.arange(24.0).view(12, 2)
        q, kv = whole[:8].chunk(ranks)[rank], whole[8:]
        self.fused = nn.Parameter(torch.cat([q, kv]))
        self.norm = nn.Parameter(torch.ones(3))
        chunks = (Chunk(8), Chunk(4, parts=1))
        self.placements = {"fused": Shard("tp", 0, chunks), "norm": Partial("tp")}


def cut_step(mesh: Mesh) -> tuple[float, list, list]:
    tp = mesh["tp"]
    model = Cut(tp.size, tp.rank)
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    grads.start()
    q = 8 // tp.size
    share = torch.full((12,), 3.0).view(12, 1)[: q + 4].clone()
    share[q:] = 6.0 / tp.size  # each rank sees a part of what shares the kv rows
    ((model.fused * share).sum() + model.norm.sum() * 2.0 / tp.size).backward()
    slices = grads.finish()
    norm = GlobalNorm(grads)(slices).item()
    return norm, slices["fused"].tolist(), slices["norm"].tolist()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shared_kv_heads_and_partial_gradients_are_summed_and_counted_once(tp: int) -> None:
    ranks = spawn(cut_step, tp=tp, preload=PRELOAD)
    norm = (16 * 9 + 8 * 36 + 3 * 4) ** 0.5
    for got, fused, partial in ranks:
        assert got == pytest.approx(norm, rel=1e-7)
        assert fused == [3.0] * (16 // tp) + [6.0] * 8
        assert partial == [2.0] * 3


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
    assert spawn(halves, True) == [276.0]
    assert spawn(halves, False) == [256.0]


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


@pytest.mark.parametrize("stage", [0, 1])
def test_state_written_into_a_fresh_optimizer_continues_exactly(stage: int) -> None:
    assert all(spawn(saved_and_restored, stage, dp=2, preload=PRELOAD))


def records(mesh: Mesh, stage: int) -> list[tuple[str, tuple, tuple]]:
    model = Net()
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh)
    optimizer = SlicedOptimizer(grads, adamw, decay_groups(grads.names, 0.1), stage)
    optimizer.prepare()
    found = optimizer.state()
    return [(key, layout.shape, layout.placement) for key, (_, layout) in found.items()]


def test_both_stages_describe_the_same_records() -> None:
    zero, one = (spawn(records, stage, dp=3, preload=PRELOAD) for stage in (0, 1))
    assert [sorted(map(str, rank)) for rank in zero] == [sorted(map(str, rank)) for rank in one]
    assert any(name == "optimizer.exp_avg.first.weight" for name, _, _ in one[0])


class Shared(nn.Module):
    """A partial norm that two stages share, as a model with tied norms would have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 3, bias=False), nn.Linear(1, 3, bias=False)
        for layer in (self.a, self.b):
            layer.weight.data.fill_(1.0)
            layer.placements = {"weight": (Partial("tp"), Tie("a.weight"))}


def shared_step(mesh: Mesh) -> list[float]:
    model = Shared()
    layouts = parameter_layouts(model, mesh.sizes, lambda name: int(name[0] == "b"))
    own = {n: p for n, p in named_parameters(model).items() if n[0] == "ab"[mesh["pp"].rank]}
    grads = GradAccumulator(own, layouts, mesh)
    grads.start()
    for name, p in own.items():
        (p * (2.0 if name[0] == "a" else 3.0)).sum().backward()
    return grads.finish()["a.weight"].tolist()


def test_a_partial_tensor_tied_over_stages_is_summed_over_both() -> None:
    assert spawn(shared_step, pp=2, tp=2, preload=PRELOAD) == [[10.0] * 3] * 4


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
        ranks = spawn(tiny, stage, dp=3, preload=PRELOAD)
        assert len(set(ranks)) == 1 and ranks[0][1] == 1


def half_frozen(mesh: Mesh) -> None:
    model = Tied()
    model.b.weight.requires_grad_(False)
    GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)


def no_layout(mesh: Mesh) -> None:
    GradAccumulator(named_parameters(Net()), {}, mesh)


def no_group(mesh: Mesh) -> None:
    model = Net()
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    SlicedOptimizer(grads, adamw, decay_groups(["scale"], 0.1))


def bad_stage(mesh: Mesh) -> None:
    sliced(mesh, 3, 1, adamw)


def bad_norm(mesh: Mesh) -> None:
    clip_({}, 0.0, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (half_frozen, "'b.weight' is frozen, but it is tied to 'a.weight', which is not"),
        (no_layout, "no layout for parameters .*first.weight"),
        (no_group, "parameters .*first.bias.* are in no group"),
        (bad_stage, "ZeRO stage 3 is not available: choose 0 or 1"),
        (bad_norm, "cannot clip to a norm of 0.0"),
    ],
)
def test_errors_are_sentences(function, message: str) -> None:
    with pytest.raises(RankError, match=message):
        spawn(function)


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
