"""Normalisation of features. A norm is a layer like others, and does not read the context.

Shapes: D features; ``...`` tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Partial, Placements
from kenotron_models.context import Context
from kenotron_models.spec import Architecture


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, computed in fp32.

    Zhang and Sennrich, arXiv 1910.07467. Every tp rank holds the whole weight (D,). Under
    ``sequence_parallel`` each sees other tokens, so the weight's gradient is partial over the axis.
    ``forward``: (..., D) -> same.
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

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of ``x``."""
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dim, in fp32.

    Ba et al., arXiv 1607.06450. Weight and bias (D,) are whole on every tp rank; see ``RMSNorm``.
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
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))  # (D,)
        self.placements: Placements = {}
        if sequence_parallel:
            self.placements = {"weight": Partial(axis.name), "bias": Partial(axis.name)}

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of ``x``."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


Norm = RMSNorm | LayerNorm


def residual_norm(
    config: Architecture,
    axis: Axis,
    *,
    sequence_parallel: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Norm:
    """A norm of the residual stream, of the kind that the model has."""
    spec = config.decoder
    kind = RMSNorm if spec.norm == "rms_norm" else LayerNorm
    return kind(
        spec.hidden_size,
        spec.norm_eps,
        axis,
        sequence_parallel=sequence_parallel,
        device=device,
        dtype=dtype,
    )
