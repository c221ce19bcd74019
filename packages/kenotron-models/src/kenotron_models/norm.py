"""Normalisation of features. A norm is a layer like others, and does not read the context.

Shapes: D features; ``...`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Partial, Placements, Roles
from kenotron_models.build import Build
from kenotron_models.context import Context


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in fp32, rounded once.

    Zhang and Sennrich, arXiv 1910.07467. Every tp rank holds the whole weight (D,). Its gradient
    is partial over the axis where each rank norms other values: under sequence parallelism other
    tokens, or as ``partial`` says.
    ``forward``: (..., D) -> same.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        build: Build,
        *,
        partial: bool | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, **build.storage))  # (D,)
        self.roles: Roles = {"weight": "norm"}
        self.placements: Placements = {}
        if build.sequence_parallel if partial is None else partial:
            self.placements["weight"] = Partial(build.tp.name)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of ``x``; that of a wider weight wins, as in torch."""
        shape = self.weight.shape
        if x.dtype == self.weight.dtype:  # one kernel on CUDA, which takes no mixed dtypes
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.rms_norm(x.float(), shape, eps=self.eps).to(x.dtype) * self.weight


class OffsetRMSNorm(RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * (1 + weight)``, in fp32, rounded once, as in Gemma.

    Its weight (D,) begins at 0, and weight decay pulls the scale to 1. See ``RMSNorm``.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        build: Build,
        *,
        partial: bool | None = None,
    ) -> None:
        super().__init__(features, eps, build, partial=partial)
        nn.init.zeros_(self.weight)
        self.roles: Roles = {"weight": "norm_offset"}

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of ``x``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)  # (D,)
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dim, in fp32.

    Ba et al., arXiv 1607.06450. Weight and bias (D,) are whole on every tp rank; see ``RMSNorm``.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        build: Build,
        *,
        partial: bool | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, **build.storage))  # (D,)
        self.bias = nn.Parameter(torch.zeros(features, **build.storage))  # (D,)
        self.roles: Roles = {"weight": "norm", "bias": "norm_bias"}
        self.placements: Placements = {}
        if build.sequence_parallel if partial is None else partial:
            own = Partial(build.tp.name)
            self.placements = {"weight": own, "bias": own}

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of ``x``."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


Norm = RMSNorm | LayerNorm  # an OffsetRMSNorm is an RMSNorm
KINDS: dict[str, type[Norm]] = {
    "rms_norm": RMSNorm,
    "offset_rms_norm": OffsetRMSNorm,
    "layer_norm": LayerNorm,
}


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over the last dim."""

    kind: Literal["rms_norm", "offset_rms_norm", "layer_norm"] = "rms_norm"
    """One of ``KINDS``."""
    eps: float = 1e-6
    """Added to the mean square or the variance."""

    def build(self, features: int, build: Build, *, partial: bool | None = None) -> Norm:
        """Make the module over (..., D).

        Args:
            features: D.
            build: how and where.
            partial: whether the weight's gradient is partial over tp; None: as under
                ``build.sequence_parallel``.
        """
        return KINDS[self.kind](features, self.eps, build, partial=partial)
