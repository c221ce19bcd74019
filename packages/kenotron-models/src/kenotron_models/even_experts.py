"""Experts on tensors without memory, under an even load: shapes, and what is sent.

Shapes: n tokens of this rank, D hidden, E experts, K experts of a token, R rows of this rank's
experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kenotron_dist import Axis
from kenotron_dist.autograd import all_to_all

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows (R, D), grouped by expert, and rows of each expert (e,) -> (R, D)."""


def even_experts(
    own: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int, axis: Axis, compute: Compute,
    *, way: str, chunks: int, meanwhile: Callable[[], None],
) -> Tensor:  # fmt: skip
    """Stand for ``mix_experts`` on tensors without memory: its shapes, under an even load.

    Args:
        own: tokens (n, D).
        experts_TK: chosen experts (n, K); not read.
        weights_TK: their weights (n, K).
        experts: E.
        axis: that of experts, whose ranks are expected to send as much as this one.
        compute: experts of this rank.
        way: not read.
        chunks: not read.
        meanwhile: called before ``compute``.
    """
    meanwhile()
    top_k = weights_TK.shape[1]
    rows = own[:, None].expand(-1, top_k, -1).reshape(-1, own.shape[1])
    even = rows.new_empty(-(-len(rows) // axis.size) * axis.size, rows.shape[1])
    even = all_to_all(torch.cat([rows, even[len(rows) :]]), axis)
    y = compute(even, torch.empty(experts // axis.size, dtype=torch.int64, device=own.device))
    y = all_to_all(y, axis)[: len(rows)]
    added = y.view(len(own), top_k, -1) * weights_TK[..., None]
    return added.sum(1).to(y.dtype)
