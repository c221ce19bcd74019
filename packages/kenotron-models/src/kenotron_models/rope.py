"""Rotary positions (Su et al., arXiv 2104.09864).

Shapes: B batch, S sequence, H heads, K features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions_BS: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, S, 1, K/2) fp32 of every position's angles; ``theta`` is the base."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BS.device)
    frequencies = 1.0 / theta ** (exponents / head_dim)
    angles = positions_BS[:, :, None, None].float() * frequencies
    return angles.cos(), angles.sin()


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
