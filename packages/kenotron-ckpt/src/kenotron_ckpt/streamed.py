"""Saving tensors that are made one at a time, by one process: a conversion in little memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt.saver import save
from kenotron_dist import Mesh, TensorLayout


@dataclass(frozen=True)
class Source:
    """A logical tensor that is made when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Makes it, on the CPU, of that shape and dtype."""


def save_streamed(
    folder: str | Path,
    step: int,
    sources: Mapping[str, Source],
    state: Mapping[str, Any],
    config_text: str | None = None,
) -> Path:
    """Stand-in until parts can be streamed."""
    tensors = {n: (s.read(), TensorLayout(n, s.shape)) for n, s in sources.items()}
    return save(folder, step, tensors, Mesh.connect(), state, config_text)
