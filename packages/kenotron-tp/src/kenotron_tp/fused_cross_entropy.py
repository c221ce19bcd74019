"""The output layer and the cross entropy of each token in one: logits exist for a few tokens.

Backward computes the logits once more.

Shapes: T tokens, n tokens of a rank, I input features, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import Handle, all_reduce
from kenotron_tp.autocast import outside_autocast
from kenotron_tp.logit_cap import cap_slope, capped_logits
from kenotron_tp.products import add_product, product
from kenotron_tp.softmax import (
    SoftmaxStatistics,
    Terms,
    local_statistics,
    losses,
    whole_statistics,
    write_gradient,
)

_CHUNK = 1024
"""Tokens of a chunk where the caller does not say."""


class Chunked(NamedTuple):
    """Options of the head's computation."""

    terms: Terms
    chunk: int
    """Tokens whose logits exist at a time; 0: as many as serve."""
    whole: bool
    """True where x is the same on all ranks: then its gradient is summed here."""
    cap: float | None = None
    """Of the logits; see ``logit_cap``."""


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, how: Chunked
    ) -> tuple[Tensor, Tensor]:
        parts = [
            local_statistics(capped_logits(product(tokens, weight.t()), how.cap), own, how.terms)
            for tokens, own in zip(x.split(how.chunk), labels.split(how.chunk), strict=True)
        ]
        found = whole_statistics(torch.cat(parts, 1), len(weight), how.terms)
        ctx.save_for_backward(x, weight, labels, *found)
        ctx.how = how
        loss, z = losses(found, labels, how.terms)
        ctx.mark_non_differentiable(z)
        return loss, z

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyrefly: ignore[bad-override]
        (x, weight, labels, *found), how = ctx.saved_tensors, ctx.how
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_x else None
        dw = None
        flight: tuple[slice, Handle] | None = None
        for start in range(0, len(x), how.chunk):
            rows = slice(start, start + how.chunk)
            logits = capped_logits(product(x[rows], weight.t()), how.cap)
            slope = None if how.cap is None else cap_slope(logits, how.cap)
            of = SoftmaxStatistics(*(each[rows] for each in found))
            write_gradient(logits, logits, labels[rows], of, grads[0][rows], how.terms)
            if slope is not None:
                logits.mul_(slope)
            handle = _start_sum(product(logits, weight), how) if needs_x else None
            if needs_weight:
                dw = added(dw, logits, x[rows], last=rows.stop >= len(x))
            _land(flight, dx)  # that of the chunk before, hidden behind these products
            flight = None if handle is None else (rows, handle)
        _land(flight, dx)
        if needs_weight and dw is None:  # no tokens
            dw = torch.zeros_like(weight)
        return dx, None if dw is None else dw.to(weight.dtype), None, None


def token_losses(x: Tensor, weight: Tensor, labels: Tensor, how: Chunked) -> tuple[Tensor, Tensor]:
    """Losses and z-losses (T,) of x (T, I) and weight (V/t, I), whose logits never exist at once.

    One all-gather of five numbers a token in forward, and in backward an all-reduce of every
    chunk's gradient where x is whole, hidden behind the products of the next.
    """
    chunk = how.chunk or _CHUNK
    return _TokenLosses.apply(x, weight, labels, how._replace(chunk=chunk))


def _start_sum(dx: Tensor, how: Chunked) -> Handle:
    if how.whole:
        return all_reduce(dx, how.terms.axis, async_op=True)
    return Handle(None, dx)


def _land(flight: tuple[slice, Handle] | None, dx: Tensor | None) -> None:
    if flight is not None and dx is not None:
        dx[flight[0]] = flight[1].wait()


def added(total: Tensor | None, dy: Tensor, x: Tensor, last: bool) -> Tensor:
    """``total`` and dy^T x; in fp32 at least where more is to come."""
    if total is None:
        first = product(dy.t(), x)
        return first if last else first.to(torch.promote_types(first.dtype, torch.float32))
    return add_product(total, dy.t(), x)
