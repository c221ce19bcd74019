"""Attention over some of the keys, and how two such results become one.

B rows, H query heads, L queries, V features of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PartialAttention(NamedTuple):
    """The result of some keys, both tensors in fp32 or fp64, and owned by the caller."""

    out: Tensor
    """Weighted mean of the values, (B, H, L, V); 0 where no key is seen."""
    lse: Tensor
    """Logarithm of the sum of exp(score), (B, H, L); -inf where no key is seen."""


def merge(left: PartialAttention, right: PartialAttention) -> PartialAttention:
    """Attention over the keys of both; ``left`` is overwritten.

    Each operation rounds by itself (no fused multiply-add), so that the result of an element does
    not depend on its place in the tensor.
    """
    top = finite(torch.maximum(left.lse, right.lse))
    ours, theirs = (left.lse - top).exp_(), (right.lse - top).exp_()
    total = ours + theirs
    lse = top + total.log()
    total = total.masked_fill_(total == 0, 1)
    left.out.mul_((ours / total)[..., None])
    left.out.add_(right.out * (theirs / total)[..., None])
    return PartialAttention(left.out, lse)


def finite(lse: Tensor) -> Tensor:
    """Replace -inf in lse (B, H, L), where nothing is seen, by 0: exp(-inf - 0) is 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
