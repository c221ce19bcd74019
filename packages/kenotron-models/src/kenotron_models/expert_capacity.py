"""Limit how many tokens of a sample an expert gets: the same choices are dropped on every layout.

Shapes: n tokens that this rank routes, K choices of a token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_dist import Axis, all_gather
from kenotron_ep import within_capacity
from kenotron_models.context import Context
from kenotron_models.routed_tokens import routed_places


def kept_choices(
    experts_TK: Tensor,
    rows: Tensor | None,
    context: Context,
    factor: float | None,
    experts: int,
    tp: Axis,
) -> Tensor:
    """Return the choices (n, K), -1 for those of a training that are beyond the capacity.

    Args:
        experts_TK: choices (n, K) of this rank's tokens.
        rows: of each token, as ``routed_rows`` returns.
        context: the micro-batch.
        factor: of ``capacity_of``; None: experts have room for all.
        experts: E.
        tp: the ranks that tokens are cut over.
    """
    if factor is None or context.loss_weight is None:
        return experts_TK
    cut, sequence, (n, top_k) = context.cut, context.positions_BS.shape[1], experts_TK.shape
    if rows is None:
        rows = torch.arange(n, device=experts_TK.device) // sequence
    return drop_beyond_capacity(
        experts_TK, rows, routed_places(context, n, tp), experts=experts,
        capacity=capacity_of(factor, top_k, cut.sequence if cut else sequence, experts),
        axes=[tp, *([] if cut is None else [cut.axis])],
    )  # fmt: skip


def capacity_of(factor: float, top_k: int, sequence: int, experts: int) -> int:
    """Return the choices of one sample that an expert has room for: ``ceil(factor * K * S / E)``.

    S counts all tokens of a row, padding included.
    """
    return math.ceil(factor * top_k * sequence / experts)


def drop_beyond_capacity(
    experts_TK: Tensor,
    rows: Tensor,
    places: Tensor,
    *,
    experts: int,
    capacity: int,
    axes: Sequence[Axis],
) -> Tensor:
    """Return the choices with those replaced by -1 for which their expert has no room.

    An expert has the same room for every sample (the groups of GShard, arXiv 2006.16668). Earlier
    tokens come first, and of one token its better choices: what is dropped of a token depends on
    the tokens before it in its sample alone, and neither on the layout nor on micro-batches.
    Collective over ``axes``: an all-gather of K + 2 integers for each token.

    Args:
        experts_TK: chosen experts, int64; -1 takes no room.
        rows: which row of the micro-batch each token is of, int64 (n,).
        places: its place in the whole row, int64 (n,).
        experts: E.
        capacity: choices of one row that an expert keeps.
        axes: those over which the tokens of a row are cut, the innermost first; n is the same on
            all their ranks.
    """
    whole, first = torch.cat([rows[:, None], places[:, None], experts_TK], 1), 0
    for axis in axes:
        first += axis.rank * len(whole)
        whole = all_gather(whole, axis)
    rows, places, every = whole[:, 0], whole[:, 1], whole[:, 2:]
    order = (rows * (places.max() + 1) + places).argsort(stable=True)
    separate = torch.where(every < 0, -1, every + rows[:, None] * experts)  # an expert of each row
    kept = torch.empty_like(separate)
    kept[order] = within_capacity(separate[order], capacity)
    return torch.where(kept[first : first + len(experts_TK)] < 0, -1, experts_TK)
