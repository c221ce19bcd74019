"""Decisions that torch's fused optimizers take on the device, inside the kernel of the update.

The protocol is that of ``torch.amp.GradScaler``: gradients are divided by ``grad_scale``, and where
``found_inf`` is not 0 neither parameters nor state nor its step count change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all groups are updated by a fused kernel that takes both decisions."""
    supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supported) and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def deciding(
    optimizer: torch.optim.Optimizer, coefficient: Tensor | None, blocked: Tensor | None
) -> Iterator[None]:
    """Let the next step of a fused optimizer scale its gradients, or change nothing.

    Args:
        optimizer: see ``is_fused``.
        coefficient: scalar by which gradients are multiplied; None: they are not.
        blocked: bool scalar; true: nothing changes. None: everything does.
    """
    if coefficient is not None:
        optimizer.grad_scale = coefficient.float().reciprocal()  # pyrefly: ignore[missing-attribute]
    if blocked is not None:
        optimizer.found_inf = blocked.float()  # pyrefly: ignore[missing-attribute]
    try:
        yield
    finally:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
