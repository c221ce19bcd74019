"""Casts of autocast to inputs of torch's own products, for the products written here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def cast_for_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast tensors, of any shape, as autocast for ``F.linear``; messages are in that dtype too."""
    device = x.device.type
    if not _casts(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    x, weight = (each if each.dtype == torch.float64 else each.to(dtype) for each in (x, weight))
    return x, weight, None if bias is None else bias.to(x.dtype)


def outside_autocast(backward: Backward) -> Backward:
    """Run a backward in the dtypes of its forward, whatever is cast around it."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        device = grads[0].device.type
        if not _casts(device):
            return backward(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run


def _casts(device: str) -> bool:
    """Return whether autocast is on; device meta has none: ``is_autocast_enabled`` refuses it."""
    return device != "meta" and torch.is_autocast_enabled(device)
