"""Rotary positions (Su et al., arXiv 2104.09864), as they are or stretched for longer texts.

Shapes: B batch, S sequence, H heads, K features of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kenotron_models.rope_scaling import RopeScaling


def rotary_angles(
    positions_BS: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, S, 1, K/2) fp32 of every position's angles.

    Arguments: positions, int64; K; the base of the wave lengths; how they are stretched.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BS.device)
    frequencies = 1.0 / theta ** (exponents / head_dim)
    if scaling is not None:
        frequencies = stretched(frequencies, scaling)
    angles = positions_BS[:, :, None, None].float() * frequencies
    return angles.cos(), angles.sin()


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies (K/2,) after stretching.

    ``linear`` divides all by the factor (Chen et al., arXiv 2306.15595); ``llama3`` those of waves
    longer than the original text over ``low_freq_factor``, none of those shorter than it over
    ``high_freq_factor``, and goes from one to the other between (Llama 3.1).
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    length = scaling.original_max_position_embeddings
    turns = length * frequencies / (2 * math.pi)  # of a wave over the original text
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x_BSHK: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn pairs of features by the angles of ``rotary_angles``; dtype and shape are kept.

    Pairs are (i, i + K/2), or neighbours (2i, 2i + 1) when ``interleaved``.
    """
    x = x_BSHK.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    if interleaved:
        return torch.stack(turned, -1).flatten(-2).to(x_BSHK.dtype)
    return torch.cat(turned, -1).to(x_BSHK.dtype)
