"""Tensors of a folder in another dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def cast(folder: Path, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of ``folder`` in another dtype. Raises ValueError when a number is too large."""
    found = values.to(dtype)
    if not found.isfinite().all():
        most = values.abs().max().item()
        raise ValueError(f"{folder}: {name} has numbers up to {most:.3g}, too large for {dtype}")
    return found
