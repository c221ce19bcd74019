"""Short causal convolution of each channel by itself, shared by all state-space mixers.

Shapes: B rows, S tokens of a row, n tokens of this rank, P pieces of a row that follow other
tokens (``segments``) of L tokens each, n = P L; C channels, W width in tokens. ``/t``
is divided by tp size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kenotron_dist import Roles
from kenotron_dist.autograd import all_gather_from
from kenotron_dist.init import Constant, Initializer, Uniform
from kenotron_dist.placement import Chunk, Placements, Shard
from kenotron_models.build import Build
from kenotron_models.segments import Segments


class ShortConvolution(nn.Module):
    """``y_t = bias + sum_k weight_k x_(t - W + 1 + k)`` for each channel; fp32, rounded once.

    ``weight`` (C/t, 1, W) and ``bias`` (C/t,) are cut over tp as the channels are. A token sees no
    token of another document.

    Args:
        channels: C.
        width: W.
        build: how and where.
        bias: whether there is one.
        chunks: what the channels are a concatenation of; empty: one chunk.

    Raises:
        ValueError: the axis does not divide a chunk.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        build: Build,
        *,
        bias: bool = True,
        chunks: Sequence[Chunk] = (),
    ) -> None:
        super().__init__()
        self.width = width
        pieces = tuple(chunks) or (Chunk(channels),)
        own = sum(local_size(chunk, build.tp.size, "channels") for chunk in pieces)
        cut = Shard(build.tp.name, 0, pieces)
        self.weight = nn.Parameter(torch.empty(own, 1, width, **build.storage))  # (C/t, 1, W)
        self.placements: Placements = {"weight": cut}
        self.roles: Roles = {"weight": "filter"}
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(own, **build.storage))  # (C/t,)
            self.placements["bias"] = cut
            self.roles["bias"] = "bias"
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, before: Tensor, since: Tensor | None) -> Tensor:
        """Convolve pieces.

        Args:
            x: (R, L, C/t), R pieces of any rows.
            before: the W - 1 tokens before each piece (R, W - 1, C/t).
            since: tokens of its document before each token (R, L), int64; None: all that there
                are belong to its document.

        Returns:
            (R, L, C/t), in the dtype of x.
        """
        y: Tensor = _Convolve.apply(x, before, self.weight, self.bias, since)
        return y


def convolution_init(width: int, name: str) -> Initializer:
    """Return first values as those of ``torch.nn.Conv1d``: draws for ``weight``, 0 for ``bias``."""
    return Uniform(1 / math.sqrt(width)) if name.endswith("weight") else Constant(0.0)


def local_size(chunk: Chunk, ranks: int, what: str) -> int:
    """Return the features of a chunk on each rank.

    Args:
        chunk: a run of features.
        ranks: size of tp.
        what: their name, for the error.

    Raises:
        ValueError: the ranks do not divide them.
    """
    parts = min(chunk.parts or ranks, ranks)
    if chunk.size % parts or ranks % parts:
        raise ValueError(
            f"cannot split {chunk.size} {what} over {ranks} tp ranks: choose a tensor-parallel "
            "size that divides them"
        )
    return chunk.size // parts


def tokens_before(x: Tensor, width: int, segments: Segments | None) -> Tensor:
    """Return the ``width`` tokens before each of this rank's pieces; zeros before a row.

    One all-gather over the axis of the cut, whose size does not depend on S, and in the backward a
    reduce-scatter.

    Args:
        x: this rank's tokens (B, n, C/t).
        width: W - 1.
        segments: how rows are cut; None: they are whole.

    Returns:
        (B P, W - 1, C/t).
    """
    if segments is None or width == 0:
        pieces = 1 if segments is None else segments.pieces
        return x.new_zeros(len(x) * pieces, width, x.shape[-1])
    ends = ends_of(x.unflatten(1, (segments.pieces, -1)), width).movedim(1, 0)  # (P, B, kept, C)
    every = all_gather_from(ends.contiguous(), segments.axis)[segments.order]
    return ends_before(every, width, segments.held).flatten(0, 1)


def ends_of(pieces: Tensor, width: int) -> Tensor:
    """Return the last tokens of pieces (..., L, C/t) that later ones need: ``width`` or fewer.

    Of short pieces all: then several make up what is needed.
    """
    return pieces[..., max(pieces.shape[-2] - width, 0) :, :]


def ends_before(every: Tensor, width: int, wanted: Sequence[int]) -> Tensor:
    """Return the ``width`` tokens before some pieces of rows, (B, ``len(wanted)``, W - 1, C/t).

    Args:
        every: the ends of all pieces in order (N, B, kept, C/t), as ``ends_of`` returns them.
        width: W - 1.
        wanted: numbers of pieces.
    """
    kept = every.shape[2]
    row = F.pad(every.movedim(0, 1).flatten(1, 2), (0, 0, width, 0))  # (B, W - 1 + ..., C)
    return torch.stack([row[:, piece * kept : piece * kept + width] for piece in wanted], 1)


class _Convolve(torch.autograd.Function):
    """Keeps its inputs only: products of single taps are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        before: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        since: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, before, weight, since)
        ctx.has_bias = bias is not None
        wide = torch.promote_types(x.dtype, torch.float32)
        taps, width = weight.to(wide)[:, 0].unbind(-1), weight.shape[-1]
        row = torch.cat([before, x], 1).to(wide)
        y = row.new_zeros(x.shape) if bias is None else bias.to(wide).expand(x.shape).clone()
        for k, tap in enumerate(taps):
            y.addcmul_(_seen(row[:, k : k + x.shape[1]], since, width - 1 - k), tap)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, before, weight, since = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        grad, width, length = grads[0].to(wide), weight.shape[-1], x.shape[1]
        row = torch.cat([before, x], 1).to(wide)
        of_row, of_taps = torch.zeros_like(row), []
        for k, tap in enumerate(weight.to(wide)[:, 0].unbind(-1)):
            own = _seen(grad, since, width - 1 - k)  # of tokens that see the one of this tap
            of_row[:, k : k + length].addcmul_(own, tap)
            of_taps.append((own * row[:, k : k + length]).sum((0, 1)))
        of_weight = torch.stack(of_taps, -1)[:, None].to(weight.dtype)
        of_bias = grad.sum((0, 1)).to(weight.dtype) if ctx.has_bias else None
        of_before, of_x = of_row.to(x.dtype).split((width - 1, length), 1)
        return of_x, of_before, of_weight, of_bias, None


def _seen(x: Tensor, since: Tensor | None, back: int) -> Tensor:
    """x (R, L, C), zero where the token ``back`` places before is of another document."""
    if since is None or back == 0:
        return x
    return x.masked_fill((since < back)[..., None], 0.0)
