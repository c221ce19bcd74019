"""Rotary positions (Su et al., arXiv 2104.09864), as they are or stretched for longer texts.

Shapes: B batch, S sequence, H heads, K features of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenotron_models.rope_scaling import RopeScaling


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of a layer."""

    theta: float = 10000.0
    """Base of the wave lengths."""
    scaling: RopeScaling | None = None
    """Scaling of positions; None: none."""
    interleaved: bool = False
    """True: rotate neighbouring features (0, 1), (2, 3); False: feature i with i + K/2."""
    share: float = 1.0
    """Share of a head's features that turn, its first ones; the others stay as they are."""

    def __post_init__(self) -> None:
        """Keep of the stretching what is read: equal positions are equal values."""
        if self.scaling is not None:
            object.__setattr__(self, "scaling", self.scaling.as_read)

    def features(self, head_dim: int) -> int:
        """Return how many features of a head turn, K of those above."""
        return int(head_dim * self.share)


def rotary_angles(
    positions_BS: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, S, 1, K/2) fp32 of every position's angles.

    Arguments: positions, int64; K; the base of the wave lengths; how they are stretched. Under
    yarn both are multiplied with its attention factor.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BS.device)
    frequencies = 1.0 / theta ** (exponents / head_dim)
    factor = 1.0
    if scaling is not None:
        frequencies = stretched(frequencies, scaling, theta)
        factor = attention_factor(scaling)
    angles = positions_BS[:, :, None, None].float() * frequencies
    if factor == 1:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def attention_factor(scaling: RopeScaling) -> float:
    """Return the factor of queries and keys: yarn's 0.1 ln(factor) + 1, or as given."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0


def stretched(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Frequencies (K/2,) after stretching.

    ``linear`` divides all by the factor (Chen et al., arXiv 2306.15595); ``llama3`` those of waves
    longer than the original text over ``low_freq_factor``, none of those shorter than it over
    ``high_freq_factor``, and goes from one to the other between (Llama 3.1); ``yarn`` those that
    turn less than ``beta_slow`` times over the original text, none of those that turn more than
    ``beta_fast`` times, and goes between by their number (Peng et al., arXiv 2309.00071).
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "yarn":
        kept = _kept_by_yarn(frequencies, scaling, theta)
    else:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _kept_by_yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Shares (K/2,) of the frequencies that stay, falling from 1 to 0 between two numbers."""
    features = 2 * len(frequencies)
    length = scaling.original_max_position_embeddings

    def number(turns: float) -> float:
        """Of the frequency that turns so often over the original text."""
        return features * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = number(scaling.beta_fast), number(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    numbers = torch.arange(len(frequencies), device=frequencies.device)
    return 1 - ((numbers - first) / ((last - first) or 0.001)).clamp(0, 1)


def rotate(x_BSHK: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn pairs of features by the angles of ``rotary_angles``; dtype and shape are kept.

    Features beyond those that have angles stay as they are. Computed in fp32 and rounded once,
    forward and backward. Pairs are (i, i + K/2), or neighbours (2i, 2i + 1) when ``interleaved``.
    No gradient goes to the angles.
    """
    if (features := 2 * cos.shape[-1]) < x_BSHK.shape[-1]:
        turned = rotate(x_BSHK[..., :features], cos, sin, interleaved=interleaved)
        return torch.cat([turned, x_BSHK[..., features:]], -1)
    if torch.compiler.is_compiling():  # a compiler fuses the plain formula
        wide = x_BSHK.to(torch.promote_types(x_BSHK.dtype, cos.dtype))
        cos, sin = cos.detach(), sin.detach()
        pair = _turned(wide, cos, sin, interleaved)
        joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return joined.to(x_BSHK.dtype)
    result: Tensor = _Rotation.apply(x_BSHK, cos, sin, interleaved, False)
    return result


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool = False
) -> tuple[Tensor, Tensor]:
    """First and second features of all pairs (B, S, H, K/2), turned or turned back, in fp32."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    if back:
        return a * cos + b * sin, b * cos - a * sin
    return a * cos - b * sin, b * cos + a * sin


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back: nothing but the angles is kept for it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.back = interleaved, back
        # Products with the fp32 angles are in fp32; the result is rounded as it is written.
        pair = _turned(x, cos, sin, interleaved, back)
        turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if interleaved:
            torch.stack(pair, -1, out=turned.unflatten(-1, (-1, 2)))
        else:
            torch.cat(pair, -1, out=turned)
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        dx = _Rotation.apply(grads[0], cos, sin, ctx.interleaved, not ctx.back)
        return dx, None, None, None, None
