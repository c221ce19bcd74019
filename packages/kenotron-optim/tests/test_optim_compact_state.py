"""Optimizer state in bfloat16: rounding, memory, layouts, decisions of the device, resuming."""

from __future__ import annotations

import gc
from typing import Any

import optim_pieces as model
import pytest
import torch
from test_optim_fused import ADAM, NAN, Reads
from test_optim_memory import SIZES, held
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.rng import counter_key
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    SlicedOptimizer,
    clip_coefficient,
    compact_state,
    decay_groups,
    update_rule,
)
from kenotron_optim.compact_state import index_noise, round_stochastically_
from kenotron_optim.rule_config import AdamWConfig, MuonConfig, SGDConfig

RULES = {
    "fused": AdamWConfig(**ADAM, torch_adam_is_fused=True),
    "loop": AdamWConfig(**ADAM, torch_adam_is_fused=False),
    "sgd": SGDConfig(momentum=0.9),
    "muon": MuonConfig(**ADAM, torch_adam_is_fused=True),
}
HALF = torch.bfloat16


def test_rounding_keeps_the_expected_value_and_what_is_exact() -> None:
    noise = torch.arange(2**16, dtype=torch.int32)
    for value in (1.0 + 2.0**-9, -3.3e-20, 1e30, 7.0):
        rounded = round_stochastically_(torch.full((2**16,), value), noise)
        assert torch.equal(rounded, rounded.bfloat16().float())
        assert rounded.double().mean().item() == pytest.approx(value, rel=1e-6)
    exact = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.5, -(2.0**-130)])
    for bits in (0, 2**16 - 1):
        found = round_stochastically_(exact.clone(), torch.full((6,), bits, dtype=torch.int32))
        assert torch.equal(found.view(torch.int32), exact.view(torch.int32))
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert round_stochastically_(nans, torch.full((3,), 65535, dtype=torch.int32)).isnan().all()


def test_noise_is_uniform_and_never_stands_still() -> None:
    noise = index_noise(1 << 18, torch.device("cpu"))
    assert noise.min() == 0 and noise.max() == 2**16 - 1
    counts = torch.bincount(noise >> 8, minlength=256)
    assert (counts - 1024).abs().max() < 6 * 32  # six standard deviations
    near = torch.corrcoef(torch.stack([noise[1:], noise[:-1]]).double())[0, 1]
    assert near.abs() < 0.01
    keys = {counter_key("optimizer state", "w", "exp_avg", step, 0) & 0xFFFF for step in range(99)}
    assert len(keys) > 95


def plain_rounding(x: Tensor, name: str, kind: str, step: int) -> Tensor:
    """What rounding does, an element at a time."""
    key, mask, found = counter_key("optimizer state", name, kind, step, 0), 0xFFFFFFFF, []
    for i, value in enumerate(x.flatten().tolist()):
        n = (i ^ (i >> 16)) * 0x7FEB352D & mask
        n = (n ^ (n >> 15)) * 0x846CA68B & mask
        n = (n ^ (n >> 16) ^ key) & 0xFFFF
        low = torch.tensor(value).view(torch.int32).item() & -65536
        up = (torch.tensor(value).view(torch.int32).item() & 0xFFFF) + n >= 1 << 16
        found.append(torch.tensor(low + (up << 16), dtype=torch.int32).view(torch.float32))
    return torch.stack(found).view_as(x)


def test_an_update_is_torchs_and_then_rounded() -> None:
    torch.manual_seed(0)
    layer, mesh = nn.Linear(7, 5), Mesh.connect()
    grads = GradAccumulator(named_parameters(layer), parameter_layouts(layer, mesh.sizes), mesh)
    groups = decay_groups(grads.names, 0.1)
    optimizer = SlicedOptimizer(grads, update_rule(RULES["loop"]), groups, 1, HALF)
    twin = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": False}
    plain = torch.optim.AdamW(twin.values(), lr=0.1, **options)
    for step in range(1, 5):
        slices = {name: torch.randn_like(p).flatten() for name, p in twin.items()}
        for name, p in twin.items():
            p.grad = slices[name].view_as(p).clone()
        optimizer.step(slices, 0.1)
        plain.step()
        for name, p in twin.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                value = plain.state[p][kind]
                value.copy_(plain_rounding(value, name, kind, step))
                found = optimizer.state()[f"optimizer.{kind}.{name}"][0]
                assert found.dtype == HALF and torch.equal(found.float(), value.flatten())
    for name, p in layer.named_parameters():
        assert torch.equal(p, twin[name])


def trained(mesh: Mesh, rule: str, stage: int, block: int, poisons: list) -> Any:
    """Parameters, own state and reads of the host after steps; some are blocked."""
    compact_state.BLOCK = block
    held_ = model.hold(mesh)
    norm, groups = GlobalNorm(held_.grads), decay_groups(held_.grads.names, 0.1)
    optimizer = SlicedOptimizer(held_.grads, update_rule(RULES[rule]), groups, stage, HALF)
    reads = 0
    for number, poison in enumerate(poisons):
        bad = poison if mesh["dp"].rank == mesh["dp"].size - 1 else None
        slices = model.backward(held_, mesh, bad, scale=2.0 ** -(number % 3))
        value = norm(slices)
        with Reads() as mode:
            coefficient = clip_coefficient(value, 1.0)
            optimizer.step(slices, 0.01, coefficient=coefficient, blocked=~value.isfinite())
        reads += mode.count
        if poison:
            optimizer.left_out()
    state = {name: tensor.float().tolist() for name, (tensor, _) in optimizer.state().items()}
    dtypes = {
        tensor.dtype for name, (tensor, _) in optimizer.state().items() if "master" not in name
    }
    return state, {p: x.tolist() for p, x in held_.parameters.items()}, dtypes, reads


@pytest.mark.parametrize("block", [2**24, 4])
@pytest.mark.parametrize("rule", ["fused", "loop", "sgd"])
def test_stages_agree_bit_for_bit(rule: str, block: int) -> None:
    one = on_ranks(trained, rule, 1, block, [{}] * 4, dp=2)
    zero = on_ranks(trained, rule, 0, block, [{}] * 4, dp=2)
    for found, other in zip(one, zero, strict=True):
        assert found[:3] == other[:3] and found[2] == {HALF}
        assert (found[3] == 0) == (other[3] == 0) == (rule == "fused")  # the device decides


def test_blocks_change_no_parameter_of_the_first_update() -> None:
    large, small = (on_ranks(trained, "fused", 1, n, [{}], dp=2) for n in (2**24, 4))
    assert [each[1] for each in large] == [each[1] for each in small]


@pytest.mark.parametrize("rule", ["fused", "loop", "sgd"])
def test_a_blocked_step_keeps_every_bit(rule: str) -> None:
    poisons = [{}, {"whole": NAN}, {"embed": NAN}]
    once = on_ranks(trained, rule, 1, 2**24, [{}], dp=2)
    then = on_ranks(trained, rule, 1, 2**24, poisons, dp=2)
    assert [each[:3] for each in once] == [each[:3] for each in then]


def test_cuts_of_the_pipeline_change_no_bit() -> None:
    [(state, parameters, _, _)] = on_ranks(trained, "fused", 1, 2**24, [{}] * 3)
    stages = on_ranks(trained, "fused", 1, 2**24, [{}] * 3, pp=2)
    for own, local, _, _ in stages:
        assert own.items() <= state.items()
        assert local.items() <= parameters.items()


def used(mesh: Mesh, stage: int) -> tuple[int, int]:
    """Bytes that are alive after two updates, and parameters."""
    before = held()
    net = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(SIZES, SIZES[1:], strict=False)]).to(HALF)
    layouts = parameter_layouts(net, mesh.sizes)
    grads = GradAccumulator(named_parameters(net), layouts, mesh, bucket_mb=0.5)
    rule = update_rule(RULES["fused"])
    optimizer = SlicedOptimizer(grads, rule, decay_groups(grads.names, 0.1), stage, HALF)
    for _ in range(2):
        grads.start(backwards=1)
        net(torch.ones(2, SIZES[0], dtype=HALF)).float().sum().backward()
        optimizer.step(grads.finish(), 0.1)
    gc.collect()
    rooms = sum(room.nbytes for room in grads._reduction._rooms)
    return held() - before - rooms, sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(("dp", "stage"), [(1, 1), (2, 0), (2, 1)])
def test_a_parameter_takes_14_bytes(dp: int, stage: int) -> None:
    for found, count in on_ranks(used, stage, dp=dp):
        share = dp if stage else 1
        assert found == pytest.approx(count * (2 + 4 + (4 + 2 + 2) / share), rel=0.02)


def test_muon_keeps_its_momentum_in_bfloat16() -> None:
    torch.manual_seed(0)
    net, mesh = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)), Mesh.connect()
    layouts = parameter_layouts(net, mesh.sizes)
    grads = GradAccumulator(named_parameters(net), layouts, mesh)
    rule = update_rule(RULES["muon"], layouts)
    optimizer = SlicedOptimizer(grads, rule, decay_groups(grads.names, 0.0), 1, HALF)
    losses = []
    for _ in range(20):
        grads.start()
        loss = (net(torch.ones(1, 8)) - 1).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step(grads.finish(), 0.05)
    kinds = {name.split(".")[1]: tensor.dtype for name, (tensor, _) in optimizer.state().items()}
    assert kinds.pop("master") == torch.float32
    assert set(kinds) == {"momentum_buffer", "exp_avg", "exp_avg_sq"} and {*kinds.values()} == {
        HALF
    }
    assert losses[-1] < losses[0] / 4


def test_a_moment_that_falls_slowly_falls() -> None:
    """To nearest it would stand still: each update changes it by less than half a step."""
    weight, mesh = nn.Linear(64, 64, bias=False), Mesh.connect()
    grads = GradAccumulator(named_parameters(weight), parameter_layouts(weight, mesh.sizes), mesh)
    rule = AdamWConfig(**ADAM | {"adam_beta2": 0.999}, torch_adam_is_fused=True)
    optimizer = SlicedOptimizer(grads, update_rule(rule), decay_groups(grads.names, 0.0), 1, HALF)
    for step in range(400):
        optimizer.step({"weight": torch.full((4096,), 1.0 if step == 0 else 0.0)}, 0.0)
    found = optimizer.state()["optimizer.exp_avg_sq.weight"][0].double().mean().item()
    assert found == pytest.approx(0.001 * 0.999**399, rel=0.03)


@pytest.mark.parametrize("rule", ["fused", "loop", "sgd"])
def test_a_resume_has_the_bits_of_the_run(rule: str) -> None:
    for found, want in on_ranks(resumed, rule, dp=2):
        assert found == want


def resumed(mesh: Mesh, rule: str) -> tuple[Any, Any]:
    """Parameters and state after four steps, with and without a stop after two."""
    results = []
    for stop in (False, True):
        held_ = model.hold(mesh)
        groups = decay_groups(held_.grads.names, 0.1)
        optimizer = SlicedOptimizer(held_.grads, update_rule(RULES[rule]), groups, 1, HALF)
        for number in range(4):
            if stop and number == 2:
                saved = {key: tensor.clone() for key, (tensor, _) in optimizer.wanted().items()}
                optimizer = SlicedOptimizer(held_.grads, update_rule(RULES[rule]), groups, 1, HALF)
                for key, (tensor, _) in optimizer.wanted().items():
                    tensor.copy_(saved[key])
                optimizer.steps = 2
                optimizer.publish()
            optimizer.step(model.backward(held_, mesh, None), 0.01)
        results.append({key: tensor.tolist() for key, (tensor, _) in optimizer.wanted().items()})
    return results[0], results[1]


def test_another_dtype_is_refused() -> None:
    layer, mesh = nn.Linear(2, 2), Mesh.connect()
    grads = GradAccumulator(named_parameters(layer), parameter_layouts(layer, mesh.sizes), mesh)
    words = "optimizer state in torch.float16 is not available: choose float32 or bfloat16"
    with pytest.raises(ValueError, match=words):
        rule = update_rule(RULES["loop"])
        SlicedOptimizer(grads, rule, decay_groups(grads.names, 0.0), 1, torch.float16)
