"""Soft cap of logits: l becomes cap * tanh(l / cap) (Gemma-2, arXiv 2408.00118).

Each logit alone: no tensor-parallel rank needs those of another.

Shapes: ``...`` any leading dims, W columns of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def capped_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return capped logits (..., W) in their dtype, computed in fp32 (fp64 for fp64).

    Args:
        logits: (..., W).
        cap: above 0; None: they are returned as they are.
    """
    if cap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (cap * (wide / cap).tanh()).to(logits.dtype)


def cap_slope(capped: Tensor, cap: float) -> Tensor:
    """Return the derivative of capped logits (..., W), in their dtype."""
    return 1 - (capped / cap).square()


def check_cap(cap: float | None) -> None:
    """Raise ValueError for a cap that is not a finite number above 0."""
    if cap is not None and not 0 < cap < float("inf"):
        raise ValueError(f"cap {cap} is not a finite number above 0: None caps nothing")
