"""Send results back to the ranks of their tokens, and add them.

T tokens of a rank, K choices of a token, S rows that it gets back, R rows of this rank's experts,
D features of a result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import all_to_all
from kenotron_ep.exchange import Exchange
from kenotron_ep.exchange_in_flight import InFlight, Pending
from kenotron_ep.row_table import add_rows, dot_rows, weighted_rows, widest


class _StartCombine(torch.autograd.Function):
    """Start returning results.

    ``rows`` and ``anchor`` are inputs without a gradient. Through them the backward pass reaches
    every communication on every rank, also where the result does not depend on ``rows``, such as
    an empty tensor that was newly made.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, rows: Tensor | None, anchor: Tensor, x: Exchange, flight: InFlight
    ) -> Tensor:
        ctx.exchange, ctx.flight = x, flight
        returned = x.grouping.by_source(y.detach())
        flight.start(all_to_all(returned, x.axis, x.receive, x.send, async_op=True))
        return y.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        arrived = ctx.flight.wait()
        return ctx.exchange.grouping.by_expert(arrived), None, None, None, None


class _FinishCombine(torch.autograd.Function):
    """Add results; backward starts sending their gradients."""

    @staticmethod
    def forward(
        ctx: Any, started: Tensor, weights_TK: Tensor, x: Exchange, flight: InFlight
    ) -> Tensor:
        back_SD = flight.wait()
        ctx.exchange, ctx.flight, ctx.dtype = x, flight, back_SD.dtype
        ctx.save_for_backward(weights_TK, back_SD if ctx.needs_input_grad[1] else None)
        factors = weights_TK
        if x.table.gaps:  # what stands for no row is zero; its weight may be infinite
            factors = factors.masked_fill(x.table.rows_TC == back_SD.shape[0], 0)
        return add_rows(back_SD, x.table, factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad_TD,), (weights_TK, back_SD), x = grads, ctx.saved_tensors, ctx.exchange
        token = grad_weights = None
        if ctx.needs_input_grad[0]:
            weights_S = weights_TK.reshape(-1).index_select(0, x.choices_S)
            rows = weighted_rows(grad_TD, x.tokens_S, weights_S)
            ctx.flight.start(all_to_all(rows, x.axis, x.send, x.receive, async_op=True))
            token = grad_TD.new_empty(0)
        if back_SD is not None:  # while gradients are under way
            dots = dot_rows(grad_TD, x.tokens_S, back_SD, widest(weights_TK, back_SD))
            grad_weights = dots.new_zeros(weights_TK.numel())
            grad_weights[x.choices_S] = dots
            grad_weights = grad_weights.view_as(weights_TK).to(weights_TK.dtype)
        return token, grad_weights, None, None


def combine(
    y_RD: Tensor, exchange: Exchange, weights_TK: Tensor, *, rows_RD: Tensor | None = None
) -> Tensor:
    """Return the weighted sum of each token's results: one all-to-all over the axis, each way.

    Args:
        y_RD: a result for each row of ``dispatch``, in the same order; any floating dtype, as many
            features as wanted.
        exchange: the plan of the dispatch.
        weights_TK: factor of each choice, any floating dtype. That of a dropped choice is not used.
        rows_RD: what ``dispatch`` returned. Give it where ``y_RD`` may not depend on it on some
            rank, as on one without rows: then this rank still takes part in the communication of
            gradients. ``mix_experts`` does.

    Returns:
        (T, D) in the dtype of ``y_RD``. Products and sums, in the order of the choices, are in fp32
        (fp64 where an input is) and rounded once. The gradient of a weight is a dot product in
        fp32.

    Raises:
        ValueError: shapes or dtypes that do not fit the plan.
    """
    return start_combine(y_RD, exchange, weights_TK, rows_RD=rows_RD).wait()


def start_combine(
    y_RD: Tensor, exchange: Exchange, weights_TK: Tensor, *, rows_RD: Tensor | None = None
) -> Pending:
    """Start ``combine``, with the same arguments; its ``wait`` returns the sums (T, D)."""
    if y_RD.ndim != 2 or y_RD.shape[0] != exchange.rows or not y_RD.is_floating_point():
        raise ValueError(
            f"combine: results are {tuple(y_RD.shape)} of {y_RD.dtype}: give (R, D) of a floating "
            f"dtype, one for each of the {exchange.rows} rows of dispatch, in their order"
        )
    wanted = exchange.table.rows_TC.shape
    if weights_TK.shape != wanted or not weights_TK.is_floating_point():
        raise ValueError(
            f"combine: weights are {tuple(weights_TK.shape)} of {weights_TK.dtype}: give "
            f"{tuple(wanted)} of a floating dtype, one for each choice"
        )
    flight = InFlight()
    anchor = torch.empty(0, requires_grad=weights_TK.requires_grad)
    started = _StartCombine.apply(y_RD, rows_RD, anchor, exchange, flight)
    return Pending(lambda: _FinishCombine.apply(started, weights_TK, exchange, flight))
