"""Updates of slices have the bits of updates of the whole, in the kernels that the mode allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kenotron_optim import AdamWConfig, SGDConfig, update_rule

RULES = {
    "adamw": AdamWConfig(adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=False),
    "sgd": SGDConfig(),
    "momentum": SGDConfig(momentum=0.9, dampening=0.1),
    "nesterov": SGDConfig(momentum=0.9, nesterov=True),
}
STEPS = 8


def updated(rule: str, size: int, ranks: int) -> list[Tensor]:
    """Values and state of all slices, joined."""
    draw = torch.Generator().manual_seed(size)
    start = torch.randn(size, generator=draw)
    scales = 10.0 ** torch.randint(-6, 2, (STEPS, size), generator=draw)
    gradients = torch.randn(STEPS, size, generator=draw) * scales
    each = -(-size // ranks)
    slices = [values.clone().requires_grad_() for values in start.split(each)]
    groups = [{"params": slices, "weight_decay": 0.1}]
    [optimizer] = update_rule(RULES[rule])(groups)
    optimizer.param_groups[0]["lr"] = 1e-2
    for gradient in gradients:
        for values, part in zip(slices, gradient.split(each), strict=True):
            values.grad = part.clone()
        optimizer.step()
    kinds = [kind for kind, x in optimizer.state[slices[0]].items() if getattr(x, "ndim", 0)]
    state = [torch.cat([optimizer.state[values][kind] for values in slices]) for kind in kinds]
    return [torch.cat([values.detach() for values in slices]), *state]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [5, 37, 1000, 4099, 70_000])
def test_slices_are_updated_as_the_whole(rule: str, size: int) -> None:
    want = updated(rule, size, 1)
    for ranks in (2, 3, 4, 7):
        got = updated(rule, size, ranks)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
