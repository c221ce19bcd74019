"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467).

Shapes: D features; ``...`` tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Partial, Placements


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, computed in fp32.

    Every tp rank holds the whole weight (D,). Under ``sequence_parallel`` each sees other tokens,
    so the weight's gradient is partial over the axis. ``forward``: (..., D) -> same.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))  # (D,)
        self.placements: Placements = {}
        if sequence_parallel:
            self.placements["weight"] = Partial(axis.name)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D), in the dtype of ``x``."""
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight
