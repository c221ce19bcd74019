"""A whole exchange in one call, in chunks that overlap with the computation.

T tokens of a rank, K choices of a token, D features, E experts, n ranks, e = E / n experts of a
rank, R rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kenotron_dist import Axis
from kenotron_ep.combining import start_combine
from kenotron_ep.dispatching import start_dispatch
from kenotron_ep.exchange import DispatchWay, Exchange, plan_chunks
from kenotron_ep.exchange_in_flight import Pending

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows (R, D) grouped by expert, counts int64 (e,)) -> results (R, any number of features); with
``by_source`` rows are grouped by source rank first, and counts are (n, e)."""


def mix_experts(
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    experts: int,
    axis: Axis,
    compute: Compute,
    *,
    way: DispatchWay = "alltoall",
    chunks: int = 1,
    pad_to: int | None = None,
    by_source: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Return ``sum over k of weights[t, k] * expert[experts[t, k]](x[t])`` for each token t.

    All ranks of ``axis`` call this together, also those without tokens. In each direction there are
    two communications a chunk, and one of counts for all chunks.

    Args:
        x_TD: tokens of this rank, any floating dtype. T may differ between ranks and be 0.
        experts_TK: int64, chosen experts in 0..E-1, -1 for a choice that is dropped.
        weights_TK: factor of each choice, any floating dtype.
        experts: E, of which rank r has those from r * e to (r + 1) * e - 1.
        axis: the ranks over which experts are distributed.
        compute: this rank's experts. It is called once a chunk, also with zero rows; gradients
            reach its parameters by autograd.
        way: how tokens are sent, see ``DispatchWay``.
        chunks: into how many parts the tokens are cut. The next chunk is sent, and the results of
            the last one return, while one is computed; the same in backward. All ranks give the
            same number, whatever their T.
        pad_to: rows of each expert in each chunk, see ``plan_exchange``.
        by_source: rows of each rank stay apart, see there.
        meanwhile: called once, after the tokens of the first chunk are sent and before they are
            awaited: what it computes, such as a shared expert, overlaps with the communication. Its
            backward overlaps with that of the gradients. Where it communicates, it must do so in
            the same order on all ranks.

    Returns:
        (T, features of a result) in the dtype of the results. If each expert treats its rows
        independently, its bits depend neither on n nor on ``way``, ``chunks`` or ``pad_to``, and
        those of gradients not on n. Gradients of ``x_TD`` for ways other than ``alltoall``, and of
        parameters with chunks or padding, are equal to rounding.

    Raises:
        ValueError: as ``plan_exchange``, ``dispatch`` and ``combine``; ``chunks`` below 1; results
            that are not one for each row.
    """
    if chunks < 1:
        raise ValueError(f"mix_experts: chunks is {chunks}, it must be at least 1")
    if not len(x_TD) == len(experts_TK) == len(weights_TK):
        raise ValueError(
            f"mix_experts: {len(x_TD)} tokens, experts of {len(experts_TK)} and weights of "
            f"{len(weights_TK)}: give one row each for every token"
        )
    choices = _cut(experts_TK, chunks)
    exchanges = plan_chunks(choices, experts, axis, way, pad_to, by_source, function="mix_experts")
    tokens, weights = _cut(x_TD, chunks), _cut(weights_TK, chunks)
    outs = _mix_chunks(tokens, weights, exchanges, compute, meanwhile)
    return outs[0] if chunks == 1 else torch.cat(outs)


def _mix_chunks(
    tokens: Sequence[Tensor],
    weights: Sequence[Tensor],
    exchanges: Sequence[Exchange],
    compute: Compute,
    meanwhile: Callable[[], None] | None,
) -> list[Tensor]:
    """Return the results of every chunk; two of them are on their way at a time."""
    outs: list[Tensor] = []
    returning: Pending | None = None
    following = start_dispatch(tokens[0], exchanges[0])
    if meanwhile is not None:
        meanwhile()
    for i, exchange in enumerate(exchanges):
        arriving = following
        if i + 1 < len(exchanges):  # travels while this chunk is computed
            following = start_dispatch(tokens[i + 1], exchanges[i + 1])
        rows = arriving.wait()
        started = _compute(compute, rows, exchange, weights[i])
        if returning is not None:  # the results of the last chunk came while this was computed
            outs.append(returning.wait())
        returning = started
    assert returning is not None  # there is a chunk
    outs.append(returning.wait())
    return outs


def _compute(compute: Compute, rows: Tensor, exchange: Exchange, weights_TK: Tensor) -> Pending:
    """Compute the experts and start returning their results."""
    y = compute(rows, exchange.counts)
    if y.ndim != 2 or y.shape[0] != exchange.rows:
        raise ValueError(
            f"mix_experts: compute returned {tuple(y.shape)} for {exchange.rows} rows: it must "
            "return (R, D), one result for each row, in their order"
        )
    return start_combine(y, exchange, weights_TK, rows_RD=rows)


def _cut(x: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Cut along the tokens into parts of nearly equal length, some of which may be empty."""
    if chunks == 1:
        return (x,)
    ends = [len(x) * (i + 1) // chunks for i in range(chunks)]
    return x.split([end - begin for begin, end in pairwise([0, *ends])])
