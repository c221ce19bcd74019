"""Sums of tensors in one binary tree: their bits do not depend on who had which of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["tree_sum", "wide_tree_sum"]


def tree_sum(
    rows: Tensor | Sequence[Tensor], out: Tensor | None = None, keep: int | None = None
) -> Tensor:
    """Sum of n tensors (``rows`` (n, ...), or a list) in a fixed binary tree.

    ``((r0 + r1) + (r2 + r3)) + r4``: neighbours first, an odd last one is carried. Half precision
    is added in fp32 and rounded once. All but the tensor number ``keep`` may be overwritten; the
    result is written to ``out`` where it is given.
    """
    parts, kept = list(rows), None if keep is None else rows[keep]
    if out is not None and len(parts) == 2:
        return torch.add(parts[0], parts[1], out=out)
    dtype = parts[0].dtype
    wide = len(parts) > 2 and dtype in (torch.bfloat16, torch.float16)  # two are rounded once
    while len(parts) > 1:
        if len(parts) == 2 and isinstance(rows, Tensor):  # new: does not keep all rows alive
            parts = [parts[0] + parts[1]]
            break
        pairs = [_add(parts[i], parts[i + 1], kept, wide) for i in range(0, len(parts) - 1, 2)]
        parts, wide = pairs + parts[2 * len(pairs) :], False
    whole = parts[0].to(dtype)
    return whole if out is None else out.copy_(whole)


def wide_tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum 2^k tensors (any shape) in the tree of ``tree_sum``; none is overwritten.

    The sum is in fp32, or in their dtype where that is wider, and not rounded to theirs.
    """
    rows = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def _add(a: Tensor, b: Tensor, kept: Tensor | None, wide: bool) -> Tensor:
    """a + b, in whichever may be overwritten; ``wide``: in fp32."""
    if wide:
        return a.float().add_(b)
    return b.add_(a) if a is kept else a.add_(b)
