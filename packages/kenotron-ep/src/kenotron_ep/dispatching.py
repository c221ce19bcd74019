"""Send tokens to the ranks of their experts.

T tokens of a rank, D features, R rows of this rank's experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_ep.exchange import Exchange
from kenotron_ep.exchange_in_flight import InFlight, Pending
from kenotron_ep.routes import RoutePair


class _StartDispatch(torch.autograd.Function):
    """Start sending tokens; the result, an empty tensor, only leads to ``_FinishDispatch``."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, route: RoutePair, flight: InFlight) -> Tensor:
        ctx.route, ctx.flight = route, flight
        flight.start(route.start(x_TD))
        return x_TD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return ctx.route.finish_backward(ctx.flight.wait()), None, None


class _FinishDispatch(torch.autograd.Function):
    """Await tokens; backward starts returning their gradients."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, route: RoutePair, flight: InFlight) -> Tensor:
        ctx.route, ctx.flight = route, flight
        return route.finish(flight.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.flight.start(ctx.route.start_backward(grads[0]))
        return grads[0].new_empty(0), None, None


def dispatch(x_TD: Tensor, exchange: Exchange) -> Tensor:
    """Send tokens to the ranks of their experts: one communication over the axis, one in backward.

    Args:
        x_TD: tokens of this rank, any floating dtype.
        exchange: the plan, made from the choices of these tokens.

    Returns:
        Rows (R, D) of this rank's experts, grouped by expert: ``exchange.counts`` has the number of
        each. Rows of one expert are in the order of all tokens, rank by rank. Gradients of a
        token's copies are added in fp32, in the order of its choices, and rounded once; for other
        ways than ``alltoall`` see ``Way`` and the README.

    Raises:
        ValueError: ``x_TD`` is not (T, D), or not floating.
    """
    return start_dispatch(x_TD, exchange).wait()


def start_dispatch(x_TD: Tensor, exchange: Exchange) -> Pending:
    """Start ``dispatch`` of ``x_TD`` (T, D); its ``wait`` returns the rows (R, D).

    What is computed in between, such as shared experts, overlaps with the communication, and its
    backward pass with that of the gradients.
    """
    if x_TD.ndim != 2 or x_TD.shape[0] != exchange.tokens or not x_TD.is_floating_point():
        raise ValueError(
            f"dispatch: x is {tuple(x_TD.shape)} of {x_TD.dtype}: give (T, D) of a floating dtype, "
            f"with the {exchange.tokens} tokens of the plan"
        )
    route, flight = exchange.route, InFlight()
    started = _StartDispatch.apply(x_TD, route, flight)
    return Pending(lambda: _FinishDispatch.apply(started, route, flight))
