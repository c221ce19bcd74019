"""A step that the device leaves out, and gradients that the update scales, unseen by the host."""

from __future__ import annotations

from typing import Any

import optim_pieces as model
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, SlicedOptimizer, clip_, clip_coefficient, decay_groups
from kenotron_optim.rule_config import AdamWConfig, MuonConfig, SGDConfig
from kenotron_optim.update_rule import update_rule

NAN = float("nan")
ADAM: dict[str, Any] = {"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95}
RULES = {
    "fused": AdamWConfig(**ADAM, torch_adam_is_fused=True),
    "loop": AdamWConfig(**ADAM, torch_adam_is_fused=False),
    "sgd": SGDConfig(momentum=0.9),
}


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def made(mesh: Mesh, rule: str, stage: int) -> tuple[Any, GlobalNorm, SlicedOptimizer]:
    held = model.hold(mesh)
    groups = decay_groups(held.grads.names, 0.1)
    optimizer = SlicedOptimizer(held.grads, update_rule(RULES[rule]), groups, stage)
    return held, GlobalNorm(held.grads), optimizer


def decided(mesh: Mesh, rule: str, stage: int, poisons: list[dict]) -> tuple[Any, int, int]:
    """Parameters and state after steps that are blocked where they are poisoned, and reads."""
    held, norm, optimizer = made(mesh, rule, stage)
    reads = 0
    for poison in poisons:
        slices = model.backward(held, mesh, poison if mesh["dp"].rank == 1 else None)
        value = norm(slices)
        with Reads() as mode:
            optimizer.step(
                slices, 0.01, coefficient=clip_coefficient(value, 1.0), blocked=~value.isfinite()
            )
        reads += mode.count
        if poison:
            optimizer.left_out()
    state = {key: tensor.tolist() for key, (tensor, _) in optimizer.wanted().items()}
    return [state, {p: x.tolist() for p, x in held.parameters.items()}], optimizer.steps, reads


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_a_blocked_step_changes_nothing(rule: str, stage: int) -> None:
    clean = on_ranks(decided, rule, stage, [{}, {}], dp=2)
    blocked = [{"whole": NAN}, {}, {"embed": NAN}, {}]
    found = on_ranks(decided, rule, stage, blocked, dp=2)
    for (state, steps, reads), (want, _, _) in zip(found, clean, strict=True):
        assert state == want and steps == 2
        assert (reads == 0) == (rule == "fused")  # the device decides


def clipped(mesh: Mesh, rule: str, bound: float) -> float:
    """How far the update differs from that of gradients that were clipped before."""
    values = []
    for early in (True, False):
        held, norm, optimizer = made(mesh, rule, 1)
        for _ in range(3):
            slices = model.backward(held, mesh, None)
            value = norm(slices)
            if early:
                clip_(slices, bound, value)
                optimizer.step(slices, 0.01)
            else:
                optimizer.step(slices, 0.01, coefficient=clip_coefficient(value, bound))
        values.append(torch.cat([p.detach().flatten().float() for p in held.parameters.values()]))
    return (values[0] - values[1]).abs().max().item()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bound", [1e-3, 1e6])
def test_the_update_clips_as_clip_does(rule: str, bound: float) -> None:
    for difference in on_ranks(clipped, rule, bound, dp=2):
        assert difference <= (1e-7 if rule == "fused" and bound < 1 else 0)


def test_a_bound_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot clip to a norm of 0: it must be above 0"):
        clip_coefficient(torch.ones(()), 0)
    assert clip_coefficient(torch.ones(()), None) is None


def test_muon_is_not_fused_and_asks_the_host() -> None:
    from kenotron_optim.fused import is_fused

    weight = torch.nn.Parameter(torch.zeros(2, 2))
    groups = [{"params": [weight], "weight_decay": 0.0, "lr_multiplier": 1.0, "matrices": True}]
    layouts = {"weight": TensorLayout("weight", (2, 2), role="hidden")}
    assert not any(map(is_fused, update_rule(MuonConfig(), layouts)(groups)))
