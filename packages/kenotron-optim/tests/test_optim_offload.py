"""Offload: the bits of an update without it, what is copied when, and whose memory it takes."""

from __future__ import annotations

from typing import Any

import optim_pieces as model
import pytest
import torch
from test_optim_compact_state import RULES
from test_optim_shards import Net, bytes_of, data
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    MuonConfig,
    SlicedOptimizer,
    clip_coefficient,
    decay_groups,
    update_rule,
)

NAN = float("nan")
Made = tuple[Net, GradAccumulator, SlicedOptimizer]


def build(
    mesh: Mesh, rule: str, stage: int, dtype: torch.dtype, state: torch.dtype, offload: bool
) -> Made:
    net = Net().to(dtype)
    layouts = parameter_layouts(net, mesh.sizes)
    reduce = "micro_batch" if stage > 1 else "step"
    grads = GradAccumulator(named_parameters(net), layouts, mesh, reduce=reduce, bucket_mb=0.001)
    groups = decay_groups(grads.names, 0.1, exclude=[".*gain"])
    config = MuonConfig(adamw_named_params=("table.*", "head.*")) if rule == "muon" else RULES[rule]
    optimizer = SlicedOptimizer(
        grads, update_rule(config, layouts), groups, stage, state, offload=offload
    )
    optimizer.overlap_forward(net.units)
    return net, grads, optimizer


def step_once(mesh: Mesh, made: Made, step: int, poison: float = 0.0) -> None:
    net, grads, optimizer = made
    norm = GlobalNorm(grads)
    grads.start(backwards=1)
    for tokens in data(mesh, step, 1):
        net(tokens).backward()
    slices = grads.finish()
    if poison:
        slices["table.weight"].fill_(poison)
    value = norm(slices)
    coefficient = clip_coefficient(value, 5.0)
    optimizer.step(slices, 0.05, coefficient=coefficient, blocked=~value.isfinite())
    if poison:
        optimizer.left_out()


def records(optimizer: SlicedOptimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, (tensor, _) in optimizer.state().items()}


def values(made: Made) -> dict[str, Tensor]:
    """Parameters and this rank's records."""
    found = records(made[2])
    made[2].wait_for_parameters()
    return found | {path: p.detach().clone() for path, p in made[0].named_parameters()}


def differences(mesh: Mesh, cases: list[tuple], poisons: list[float]) -> list[str]:
    """Names of tensors that offload changes after some steps, of which some are blocked."""
    found = []
    for case in cases:
        ends = []
        for offload in (False, True):
            made = build(mesh, *case, offload)
            for step, poison in enumerate(poisons):
                step_once(mesh, made, step, poison)
            ends.append(values(made))
        plain, moved = ends
        assert plain.keys() == moved.keys() and any("optimizer.master" in name for name in plain)
        assert all(plain[name].dtype == moved[name].dtype for name in plain)
        found += [f"{case} {name}" for name in plain if not torch.equal(plain[name], moved[name])]
    return found


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("rule", ["fused", "loop", "sgd", "muon"])
@pytest.mark.by_turns(3)
def test_it_changes_no_bit(rule: str, dp: int) -> None:
    cases = [
        (rule, stage, dtype, state)
        for stage in range(4)
        for dtype in (torch.float32, torch.bfloat16)
        for state in (torch.float32, torch.bfloat16)
    ]
    assert on_ranks(differences, cases, [0.0] * 3, dp=dp) == [[]] * dp


@pytest.mark.parametrize("rule", ["fused", "loop"])
def test_a_blocked_step_changes_none_either(rule: str) -> None:
    cases = [(rule, stage, torch.bfloat16, torch.float32) for stage in (1, 3)]
    assert on_ranks(differences, cases, [0.0, NAN, 0.0], dp=2) == [[]] * 2


def tp_differences(mesh: Mesh, stage: int) -> bool:
    """Tied, padded and replicated tensors over tp and pp."""
    ends = []
    for offload in (False, True):
        held = model.hold(mesh, dtype=torch.bfloat16)
        groups = decay_groups(held.grads.names, 0.1)
        rule = update_rule(RULES["fused"])
        optimizer = SlicedOptimizer(held.grads, rule, groups, stage, offload=offload)
        for _ in range(3):
            optimizer.step(model.backward(held, mesh), 0.01)
        ends.append(records(optimizer) | {p: x.clone() for p, x in held.parameters.items()})
    return all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("stage", [0, 1])
def test_it_changes_no_bit_over_tp_and_pp(stage: int) -> None:
    assert all(on_ranks(tp_differences, stage, dp=2, tp=2))
    assert all(on_ranks(tp_differences, stage, pp=2))


def resumed(mesh: Mesh, first: tuple, then: tuple, started: bool) -> bool:
    """Continue from records of a run with or without offload."""
    made = build(mesh, *first)
    other = build(mesh, *then)
    if started:
        step_once(mesh, made, 0)
    saved = records(made[2])
    step_once(mesh, other, 7)  # its values are overwritten
    fresh = build(mesh, *then)
    for optimizer in (other[2], fresh[2]):
        for tensor, layout in optimizer.wanted(started=started).values():
            if layout.name in saved and saved[layout.name].shape == tensor.shape:
                tensor.copy_(saved[layout.name])
        optimizer.steps = made[2].steps
        optimizer.publish()
    for each in (made, other, fresh):
        step_once(mesh, each, 1)
    ends = [values(each) for each in (made, other, fresh)]
    names = [name for name in ends[0] if "optimizer" not in name or name in ends[1]]
    return all(torch.equal(ends[0][n], end[n]) for n in names for end in ends[1:])


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("before", "now"), [(True, False), (False, True), (True, True)])
def test_a_run_resumes_with_or_without_it(
    before: bool, now: bool, dtype: torch.dtype, started: bool
) -> None:
    for stages in ((1, 3), (3, 2)):
        first, then = (
            ("loop", stage, dtype, torch.float32, offload)
            for stage, offload in zip(stages, (before, now), strict=True)
        )
        assert all(on_ranks(resumed, first, then, started, dp=2))


def loaded(mesh: Mesh, stage: int) -> list[float]:
    """Parameters that are loaded alone, whole or as slices, become masters."""
    made = build(mesh, "fused", stage, torch.bfloat16, torch.float32, True)
    optimizer = made[2]
    if stage == 3:
        for tensor, _ in optimizer.parameter_slices().values():
            tensor.fill_(2.0)
    else:
        for parameter in made[0].parameters():
            parameter.data.fill_(2.0)
    optimizer.reload()
    optimizer.wait_for_parameters()
    masters = [x for name, x in records(optimizer).items() if "master" in name]
    weight = made[0].layers[1].up.weight.float()
    return sorted({weight.min().item(), weight.max().item(), *torch.cat(masters).tolist()})


@pytest.mark.parametrize("stage", range(4))
def test_parameters_are_loaded_alone(stage: int) -> None:
    assert on_ranks(loaded, stage, dp=2) == [[2.0]] * 2


def filled(mesh: Mesh, offload: bool) -> dict[str, Tensor]:
    """Stage 3 whose parameters get their first values layer by layer."""
    net = Net().to(torch.bfloat16)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.untyped_storage().resize_(0)
    layouts = parameter_layouts(net, mesh.sizes)
    grads = GradAccumulator(named_parameters(net), layouts, mesh, reduce="micro_batch")
    rule, groups = update_rule(RULES["fused"]), decay_groups(grads.names, 0.1)
    optimizer = SlicedOptimizer(grads, rule, groups, 3, offload=offload)

    def fill(unit: nn.Module) -> None:
        for i, parameter in enumerate(unit.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.data.copy_(torch.sin(count + i).view(parameter.shape) / 3)

    optimizer.overlap_forward(net.units, fill)
    step_once(mesh, (net, grads, optimizer), 0)
    return values((net, grads, optimizer))


def both_filled(mesh: Mesh) -> bool:
    plain, moved = filled(mesh, False), filled(mesh, True)
    return all(torch.equal(plain[name], moved[name]) for name in plain)


def test_stage_3_takes_first_values() -> None:
    assert all(on_ranks(both_filled, dp=2))


def memory(mesh: Mesh, stage: int, state: torch.dtype) -> dict[str, int]:
    """Bytes between steps and at most within an update, by where they are."""
    made = build(mesh, "fused", stage, torch.bfloat16, state, True)
    optimizer = made[2]
    inner: Any = optimizer._inner[0]

    def on_device() -> int:
        entries = [entry for each in inner.state.values() for entry in each.values()]
        return bytes_of([*optimizer.masters.values(), *(x for x in entries if x.ndim)])

    before, most, calls, advance = on_device(), 0, 0, inner.step

    def look() -> None:
        nonlocal most, calls
        advance()
        most, calls = max(most, on_device()), calls + 1

    inner.step = look
    step_once(mesh, made, 0)
    after, host = on_device(), [tensor for tensor, _ in optimizer.state().values()]
    widths = [bucket.width for bucket in made[1].buckets]
    return {
        "before": before, "after": after, "most": most, "calls": calls, "buckets": len(widths),
        "largest": max(widths), "host": bytes_of(host), "masters": sum(h.nbytes for h in host),
    }  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_device_has_one_bucket_at_a_time(stage: int) -> None:
    for found in on_ranks(memory, stage, torch.float32, dp=2):
        assert found["before"] == found["after"] == 0 and found["buckets"] > 5
        assert found["calls"] == found["buckets"]
        assert found["most"] == 12 * found["largest"]
        assert found["host"] == found["masters"] > 12 * found["largest"]
