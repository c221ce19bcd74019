"""AdamW and SGD by config, with groups, against torch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    AdamWConfig,
    GradAccumulator,
    LRMultiplier,
    ParameterGroup,
    SGDConfig,
    SlicedOptimizer,
    parameter_groups,
    update_rule,
)

Config = AdamWConfig | SGDConfig
ROWS, DECAY = 12, 0.1
ADAMW = AdamWConfig(
    adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=False
)  # fmt: skip
FUSED = AdamWConfig(adam_eps=1e-6, adam_beta1=0.8, adam_beta2=0.9, torch_adam_is_fused=True)
PLAIN = SGDConfig()
MOMENTUM = SGDConfig(momentum=0.9, dampening=0.25)
NESTEROV = SGDConfig(momentum=0.9, nesterov=True)
RULES = [ADAMW, FUSED, PLAIN, MOMENTUM, NESTEROV]
MULTIPLIERS = (
    LRMultiplier(pattern=r"head\..*", multiplier=0.25),
    LRMultiplier(pattern="table.*", multiplier=3.0),
)


class Net(nn.Module):
    """All kinds of parameters, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(5, 7), nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.table(rows)))).square().sum() / ROWS


def data(step: int) -> Tensor:
    return torch.randint(5, (ROWS,), generator=torch.Generator().manual_seed(step))


def rate(step: int) -> float:
    return 0.05 / (step + 1)


def values(model: nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


class Run:
    """A model and what updates it."""

    def __init__(self, mesh: Mesh, config: Config, stage: int) -> None:
        self.model, self.mesh = Net(), mesh
        layouts = parameter_layouts(self.model, mesh.sizes)
        self.grads = GradAccumulator(named_parameters(self.model), layouts, mesh)
        groups = parameter_groups(
            self.grads.names,
            DECAY,
            exclude_kinds=("norms", "biases"),
            layouts=layouts,
            lr_multipliers=MULTIPLIERS,
        )
        self.optimizer = SlicedOptimizer(self.grads, update_rule(config), groups, stage)

    def step(self, step: int) -> None:
        own = data(step).chunk(self.mesh["dp"].size)[self.mesh["dp"].rank]
        self.grads.start()
        self.model(own).backward()
        self.optimizer.step(self.grads.finish(), rate(step))


def sliced(mesh: Mesh, config: Config, stage: int, steps: int) -> list[list[float]]:
    run = Run(mesh, config, stage)
    for step in range(steps):
        run.step(step)
    return values(run.model)


def plain(config: Config, steps: int) -> list[list[float]]:
    """The same with nothing but torch, its groups written out by hand."""
    model = Net()
    table, head, norm = model.table, model.head, model.norm
    groups = [
        {"params": [table.weight], "weight_decay": DECAY, "factor": 3.0},
        {"params": [head.weight], "weight_decay": DECAY, "factor": 0.25},
        {"params": [head.bias], "weight_decay": 0.0, "factor": 0.25},
        {"params": [norm.weight, norm.bias], "weight_decay": 0.0, "factor": 1.0},
    ]
    if isinstance(config, SGDConfig):
        optimizer = torch.optim.SGD(
            groups, 0.0, config.momentum, config.dampening, nesterov=config.nesterov
        )
    else:
        optimizer = torch.optim.AdamW(
            groups,
            0.0,
            (config.adam_beta1, config.adam_beta2),
            config.adam_eps,
            fused=config.torch_adam_is_fused,
        )
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step)).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step) * group["factor"]
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("config", RULES, ids=str)
def test_one_process_is_exactly_torch(config) -> None:
    want = plain(config, 20)
    for stage in (0, 1):
        assert on_ranks(sliced, config, stage, 20) == [want]


@pytest.mark.parametrize("config", RULES, ids=str)
def test_two_ranks_of_either_stage_agree_bit_for_bit_and_with_torch(config) -> None:
    zero, one = (on_ranks(sliced, config, stage, 8, dp=2) for stage in (0, 1))
    assert zero == one and zero[0] == zero[1]
    for got, want in zip(zero[0], plain(config, 8), strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_a_multiplier_of_one_changes_no_bit_and_one_of_zero_holds_a_parameter() -> None:
    def after(factor: float) -> Tensor:
        group = ParameterGroup(("weight",), DECAY, factor)
        return on_ranks(one_group, group)[0]

    assert after(1.0) == on_ranks(one_group, ParameterGroup(("weight",), DECAY))[0]
    assert after(0.0) == [1.0, 2.0]
    assert after(2.0) != after(1.0)


def one_group(mesh: Mesh, group: ParameterGroup) -> list[float]:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, {}), mesh)
    optimizer = SlicedOptimizer(grads, update_rule(NESTEROV), [group])
    for _ in range(3):
        grads.start()
        model(torch.tensor([[0.5, 0.7]])).sum().backward()
        optimizer.step(grads.finish(), 0.1)
    return model.weight.flatten().tolist()


def by_formula(mesh: Mesh, dtype: torch.dtype, microbatches: int, decay: float) -> float:
    """Largest difference of masters from w - lr (g + decay w) over 100 steps, in fp32."""
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    torch.manual_seed(1)
    model.weight.data.copy_(torch.randn(2, 3))
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh)
    groups = [ParameterGroup(("weight",), decay, 0.5)]
    optimizer = SlicedOptimizer(grads, update_rule(PLAIN), groups, 0)
    want, worst = model.weight.detach().float().clone(), 0.0
    for step in range(100):
        rows = torch.randn(2, microbatches, 3, generator=torch.Generator().manual_seed(step))
        rows, own = rows.to(dtype), mesh["dp"].rank
        grads.start()
        for row in rows.chunk(mesh["dp"].size)[own].flatten(0, -2):
            model(row).sum().backward()
        optimizer.step(grads.finish(), 0.02)
        gradient = rows.float().sum((0, 1)).expand(2, 3)
        want -= 0.01 * (gradient + decay * want)
        masters = torch.cat([optimizer.masters["weight", r] for r in range(mesh["dp"].size)])
        worst = max(worst, (masters.detach() - want.flatten()).abs().max().item())
        if not torch.equal(model.weight.flatten(), masters.to(dtype)):
            return float("inf")
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("microbatches", "dp"), [(1, 1), (10, 2)])
def test_sgd_follows_its_formula_for_a_hundred_steps(dtype, microbatches: int, dp: int) -> None:
    for decay in (0.0, 0.1):
        worst = on_ranks(by_formula, dtype, microbatches, decay, dp=dp)
        assert max(worst) < 1e-5


def saved_and_restored(mesh: Mesh, config: Config, stage: int) -> list:
    """A fresh optimizer filled with another's state goes on exactly like it."""
    one, two = Run(mesh, config, stage), Run(mesh, config, stage)
    for step in range(3):
        one.step(step)
    two.optimizer.prepare()
    source, wanted = one.optimizer.wanted(), two.optimizer.wanted()
    assert set(source) == set(wanted)
    for key, (tensor, layout) in wanted.items():
        assert layout == source[key][1]
        tensor.copy_(source[key][0])
    two.optimizer.steps = one.optimizer.steps
    two.optimizer.publish()
    for step in range(3, 6):
        one.step(step)
        two.step(step)
    kinds = {layout.name.split(".")[1] for _, layout in one.optimizer.state().values()}
    return [values(one.model) == values(two.model), two.optimizer.steps, sorted(kinds)]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (ADAMW, ["exp_avg", "exp_avg_sq", "master"]),
        (PLAIN, ["master"]),
        (MOMENTUM, ["master", "momentum_buffer"]),
    ],
    ids=str,
)
def test_state_written_into_a_fresh_optimizer_continues_exactly(config, kinds, stage: int) -> None:
    ranks = on_ranks(saved_and_restored, config, stage, dp=2)
    assert ranks == [[True, 6, kinds]] * 2
