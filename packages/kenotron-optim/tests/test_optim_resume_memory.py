"""A run that fits in memory while it trains also fits when it is resumed."""

from __future__ import annotations

import pytest
import torch
from optim_live_bytes import LiveBytes
from torch import nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    AdamWConfig,
    GradAccumulator,
    MuonConfig,
    SGDConfig,
    SlicedOptimizer,
    decay_groups,
    update_rule,
)

LAYERS, WIDTH = 16, 64
ADAM = {"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95}
RULES = {
    "adamw": AdamWConfig(**ADAM, torch_adam_is_fused=False),
    "fused": AdamWConfig(**ADAM, torch_adam_is_fused=True),
    "sgd": SGDConfig(momentum=0.9),
    "muon": MuonConfig(**ADAM, torch_adam_is_fused=False),
}
Built = tuple[nn.Module, GradAccumulator, SlicedOptimizer]


def build(mesh: Mesh, rule: str, stage: int) -> Built:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).bfloat16()
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=0.02)
    groups = decay_groups(grads.names, 0.1, [r".*\.bias"])
    return model, grads, SlicedOptimizer(grads, update_rule(RULES[rule], layouts), groups, stage)


def live_bytes(built: Built) -> LiveBytes:
    """A counter that knows the parameters, gradient buffers, masters and their state."""
    model, grads, optimizer = built
    live = LiveBytes()
    live.count([list(model.parameters()), grads.buffers, optimizer.masters])
    live.count([tensor for _, _, tensor in optimizer._tensors()])
    return live


def update(mesh: Mesh, built: Built) -> None:
    model, grads, optimizer = built
    grads.start()
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step(grads.finish(), 0.1)


def peaks(mesh: Mesh, rule: str, stage: int) -> tuple[int, int]:
    """Most bytes that were alive in a training step, and in a resume."""
    built = build(mesh, rule, stage)
    update(mesh, built)
    with (training := live_bytes(built)):
        update(mesh, built)
    del built
    built = build(mesh, rule, stage)
    with (resume := live_bytes(built)):
        for tensor, _ in built[2].wanted().values():
            tensor.fill_(0.5)
        built[2].steps = 3
        built[2].publish()
    return training.peak, resume.peak


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_a_resume_needs_no_more_memory_than_a_step(rule: str, stage: int) -> None:
    for training, resume in on_ranks(peaks, rule, stage, dp=2):
        # A fused update has no temporaries: a resume has a copy and a gradient of one matrix.
        assert resume <= training + 2 * 4 * WIDTH * WIDTH
