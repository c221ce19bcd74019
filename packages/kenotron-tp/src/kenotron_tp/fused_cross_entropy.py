"""The output layer and the cross entropy in one: logits exist for a few tokens at a time.

Where each token's loss is wanted, backward computes the logits once more. A sum has one gradient
for all tokens, so what it is times is all that its backward has to add: the gradients of x and W
are made while the logits of a chunk are there, which are computed once.

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
from kenotron_tp.softmax_once import (
    Shares,
    computes_once,
    local_shares,
    write_gradient_of_shares,
)

_CHUNK = 1024
"""Tokens of a chunk of ``token_losses`` where the caller does not say."""
LOGITS_AT_A_TIME = 2**25
"""Logits of a rank on a CPU, where the caller does not say: 128 MB in fp32."""
LOGITS_ON_ACCELERATOR = 2**29
"""The same on an accelerator, 3 GB with their fp32 softmax: it is bound by the weight and its
gradient, which every chunk reads and writes, and by the time that launching kernels takes."""
TOKENS_ON_ACCELERATOR = 2048
"""Tokens of a chunk on an accelerator, at least: fewer leave matrix products bound by memory."""


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
    """``total`` (V/t, I) and dy^T x of a chunk: dy (rows, V/t) and x (rows, I).

    In fp32 at least where more is to come.
    """
    if total is None:
        first = product(dy.t(), x)
        return first if last else first.to(torch.promote_types(first.dtype, torch.float32))
    return add_product(total, dy.t(), x)


def tokens_at_a_time(tokens: int, width: int, device_type: str) -> int:
    """Return the tokens of a chunk, for logits (tokens, width): chunks are of about equal size."""
    width = max(width, 1)
    if device_type == "cpu":
        return max(LOGITS_AT_A_TIME // width, 1)
    limit = max(LOGITS_ON_ACCELERATOR // width, TOKENS_ON_ACCELERATOR)
    chunks = max(-(-tokens // limit), 1)
    return max(-(-tokens // chunks), 1)


class _SummedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, how: Chunked, times: Tensor
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dtype = torch.promote_types(x.dtype, torch.float32)
        loss, z = x.new_zeros((), dtype=dtype), x.new_zeros((), dtype=dtype)
        dx = torch.empty_like(x) if needs_x else None
        dw: Tensor | None = None
        for start in range(0, len(x), how.chunk):
            rows = slice(start, start + how.chunk)
            tokens, own = x[rows], labels[rows]
            logits = capped_logits(product(tokens, weight.t()), how.cap)
            slope = None if how.cap is None else cap_slope(logits, how.cap)
            each, z_each = _losses_and_gradient(
                logits, own, how.terms, times if needs_x or needs_weight else None
            )
            loss, z = loss + each.sum(), z + z_each.sum()
            if slope is not None:
                logits.mul_(slope)
            if dx is not None:
                part = product(logits, weight)
                dx[rows] = all_reduce(part, how.terms.axis) if how.whole else part
            if needs_weight:
                dw = added(dw, logits, tokens, last=rows.stop >= len(x))
        if needs_weight and dw is None:  # no tokens
            dw = torch.zeros_like(weight)
        ctx.made = dx, None if dw is None else dw.to(weight.dtype)
        loss, z = loss * times, z * times
        ctx.mark_non_differentiable(z)
        return loss, z

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        made, ctx.made = ctx.made, None  # they are this node's own: nothing is copied
        if made is None:
            raise RuntimeError("a sum of cross entropies has one backward: its gradients are gone")
        dx, dw = (None if each is None else each.mul_(grads[0].to(each.dtype)) for each in made)
        return dx, dw, None, None, None


def summed_losses(
    x: Tensor, weight: Tensor, labels: Tensor, how: Chunked, times: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums of losses and z-losses of x (T, I) and weight (V/t, I), times a scalar.

    An all-gather of five numbers a token in forward, and there an all-reduce of every chunk's
    gradient where x is whole.
    """
    size = how.chunk or tokens_at_a_time(len(labels), len(weight), labels.device.type)
    return _SummedLosses.apply(x, weight, labels, how._replace(chunk=size), times)


def _losses_and_gradient(
    logits: Tensor, labels: Tensor, terms: Terms, times: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return loss and z-loss of each row of logits (T, W); overwrite logits by their gradient.

    ``times``: what the losses are multiplied with in the gradient; None: no gradient is wanted.
    Collective over the axis of the terms.
    """
    shares: Shares | None = None
    if computes_once(logits, terms):
        shares = local_shares(logits, labels, terms)
    local = local_statistics(logits, labels, terms) if shares is None else shares.statistics
    of: SoftmaxStatistics = whole_statistics(local, logits.shape[-1], terms)
    found = losses(of, labels, terms)
    if times is not None:
        weight = times.expand_as(found[0])
        if shares is None:
            write_gradient(logits, logits, labels, of, weight, terms)
        else:
            write_gradient_of_shares(logits, shares, labels, of, weight, terms)
    return found
