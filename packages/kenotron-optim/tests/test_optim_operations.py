"""How many operations a step costs beside its arithmetic: views and copies of each parameter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron_dist import Mesh
from kenotron_dist.placement import parameter_layouts
from kenotron_optim import (
    AdamWConfig,
    GlobalNorm,
    GradAccumulator,
    SlicedOptimizer,
    clip_coefficient,
    parameter_groups,
    update_rule,
)

ADAMW = AdamWConfig(adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True)


class Operations(TorchDispatchMode):
    """Counts ATen operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.found[function.name().removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def operations(layers: int) -> Counter[str]:
    """Of one step over so many matrices: gradients received, norm, clip, update, publish."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers)))
    parameters = dict(model.named_parameters())
    mesh = Mesh.connect()
    grads = GradAccumulator(parameters, parameter_layouts(model, mesh.sizes), mesh)
    norm = GlobalNorm(grads)
    groups = parameter_groups(grads.names, weight_decay=0.1)
    optimizer = SlicedOptimizer(grads, update_rule(ADAMW), groups)

    def step(gradients: dict[str, Tensor]) -> None:
        grads.start(1)
        for path, gradient in gradients.items():
            grads.receive_gradient(path, gradient)
        slices = grads.finish()
        value = norm(slices)
        optimizer.step(slices, 0.1, coefficient=clip_coefficient(value, 1.0))

    step({path: torch.ones(4, 4) for path in parameters})  # makes state
    with Operations() as counted:
        step({path: torch.ones(4, 4) for path in parameters})
    counted.found["ones"] = 0  # the test's own
    return counted.found


def test_a_parameter_adds_one_copy_to_a_step() -> None:
    few, many = operations(3), operations(8)
    assert many - few == Counter({"copy_": 5})
    assert few.total() <= 40
