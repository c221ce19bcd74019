"""Every product with a weight: the one room that decides how a contraction is computed.

Shapes: T tokens, I input and O output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``, which torch differentiates.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,).
    """
    return F.linear(x, weight, bias)


def product(x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return x times w, (T, O): forward x W^T, backward dy W and dy^T x are products of this kind.

    Args:
        x: (T, I).
        w: (I, O).
        bias: (O,), added to each row.
        out: (T, O) that is overwritten by the result; nothing is differentiated then.
    """
    if bias is None:
        return torch.mm(x, w, out=out)
    return torch.addmm(bias, x, w, out=out)


def add_product(total: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Add x (T, I) times w (I, O) to ``total`` (T, O), in place, and return it.

    A total of another dtype gets a product that was rounded before.
    """
    if total.dtype == x.dtype:
        return total.addmm_(x, w)
    return total.add_(product(x, w))
