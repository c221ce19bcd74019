"""Normalisation of features. A norm is a layer like others, and does not read the context.

Shapes: D features; ``...`` tokens. Of attention: h query heads and g kv heads of this rank, K
features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kenotron_dist import Axis, Roles, all_reduce
from kenotron_dist.placement import Chunk, Partial, Placements, Shard
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.virtual_chunks import in_chunks


class _Scaled(nn.Module):
    """A weight (D,) over features, which every tp rank holds whole.

    Its gradient is partial over the axis where each rank norms other values: under sequence
    parallelism other tokens, or as ``partial`` says.
    """

    def __init__(
        self, features: int, eps: float, build: Build, *, partial: bool | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, **build.storage))  # (D,)
        self.roles: Roles = {"weight": "norm"}
        self.placements: Placements = {}
        if build.sequence_parallel if partial is None else partial:
            self.placements["weight"] = Partial(build.tp.name)


class RMSNorm(_Scaled):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in fp32, rounded once.

    Zhang and Sennrich, arXiv 1910.07467. ``forward``: (..., D) -> same.
    """

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of the weight."""
        if context is not None and context.chunks:
            return in_chunks(self, x, context)
        shape, dtype = self.weight.shape, self.weight.dtype
        if x.dtype == dtype:  # one kernel on CUDA, which takes no mixed dtypes
            return F.rms_norm(x, shape, self.weight, self.eps)
        return (F.rms_norm(x.float(), shape, eps=self.eps).to(x.dtype) * self.weight).to(dtype)


class OffsetRMSNorm(RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * (1 + weight)``, in fp32, rounded once, as in Gemma.

    Its weight (D,) begins at 0, and weight decay pulls the scale to 1. See ``RMSNorm``.
    """

    def __init__(
        self, features: int, eps: float, build: Build, *, partial: bool | None = None
    ) -> None:
        super().__init__(features, eps, build, partial=partial)
        nn.init.zeros_(self.weight)
        self.roles: Roles = {"weight": "norm_offset"}

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of the weight."""
        if context is not None and context.chunks:
            return in_chunks(self, x, context)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)  # (D,)
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(self.weight.dtype)


class LayerNorm(_Scaled):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dim, in fp32.

    Ba et al., arXiv 1607.06450. The bias (D,) is placed as the weight is.
    """

    def __init__(
        self, features: int, eps: float, build: Build, *, partial: bool | None = None
    ) -> None:
        super().__init__(features, eps, build, partial=partial)
        self.bias = nn.Parameter(torch.zeros(features, **build.storage))  # (D,)
        self.roles["bias"] = "norm_bias"
        if "weight" in self.placements:
            self.placements["bias"] = self.placements["weight"]

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(..., D) -> (..., D), in the dtype of the weight."""
        if context is not None and context.chunks:
            return in_chunks(self, x, context)
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(self.weight.dtype)


class HeadsRMSNorm(nn.Module):
    """``RMSNorm`` over the features of all heads together, where heads are cut over tp.

    ``weight`` (h K,) is cut as the heads are: with fewer kv heads than ranks, parts of it have
    replicas. The mean of squares comes from ``mean_squares``, which communicates.

    Args:
        heads: heads of all ranks.
        features: K.
        eps: added to the mean of squares.
        build: how and where.
    """

    def __init__(self, heads: int, features: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        own = max(heads // build.tp.size, 1) * features
        self.weight = nn.Parameter(torch.ones(own, **build.storage))  # (h K,)
        self.roles: Roles = {"weight": "norm"}
        chunk = Chunk(heads * features, parts=heads)
        self.placements: Placements = {"weight": Shard(build.tp.name, 0, (chunk,))}

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return x (..., h, K), normed, in its dtype; ``mean`` (...) of squares is fp32."""
        scale = (mean + self.eps).rsqrt()[..., None, None]
        return (x * scale).to(x.dtype) * self.weight.view(x.shape[-2:])


def mean_squares(qk: Tensor, heads: int, axis: Axis) -> Tensor:
    """Return the mean of squares over all heads of all ranks, of queries and of keys.

    One all-reduce over the axis forward, and one backward: all ranks' results depend on each one's
    heads. Ranks have equally many; a kv head on several of them counts as often, and so in the
    divisor.

    Args:
        qk: queries and keys (..., h + g, K) of this rank.
        heads: h.
        axis: tp.

    Returns:
        (..., 2) in fp32, or in the wider dtype of ``qk``.
    """
    if axis.size == 1 and torch.compiler.is_compiling():  # a compiler chooses what is kept
        return _own_means(qk, heads)
    means: Tensor = _MeanSquares.apply(qk, heads, axis)
    return means


def _own_means(qk: Tensor, heads: int) -> Tensor:
    squares = qk.to(torch.promote_types(qk.dtype, torch.float32)).square().mean(-1)
    return torch.stack([squares[..., :heads].mean(-1), squares[..., heads:].mean(-1)], -1)


class _MeanSquares(torch.autograd.Function):
    """Keeps its input only, in its own dtype, which attention keeps as well."""

    @staticmethod
    def forward(ctx: Any, qk: Tensor, heads: int, axis: Axis) -> Tensor:
        ctx.save_for_backward(qk)
        ctx.heads, ctx.axis = heads, axis
        return all_reduce(_own_means(qk, heads), axis) / axis.size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        (qk,), heads = ctx.saved_tensors, ctx.heads
        grad = all_reduce(grads[0], ctx.axis) / ctx.axis.size  # (..., 2)
        counts = [heads * qk.shape[-1], (qk.shape[-2] - heads) * qk.shape[-1]]
        parts = zip(grad.unbind(-1), qk.tensor_split((heads,), -2), counts, strict=True)
        found = [2 / n * each[..., None, None] * part for each, part, n in parts]
        return torch.cat(found, -2).to(qk.dtype), None, None


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
