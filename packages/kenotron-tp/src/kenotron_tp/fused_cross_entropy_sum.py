"""The output layer and the summed cross entropy in one, gradients included.

A sum has one gradient for all tokens, so what it is times is all that the backward has to add: the
gradients of x and W are made while the logits of a chunk are there, which are computed once. (For a
loss of every token see ``fused_cross_entropy``.)

Shapes: T tokens, n tokens of a rank, I input features, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import all_reduce
from kenotron_tp.autocast import outside_autocast
from kenotron_tp.fused_cross_entropy import Chunked, added
from kenotron_tp.logit_cap import cap_slope, capped_logits
from kenotron_tp.products import product
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

LOGITS_AT_A_TIME = 2**25
"""Logits of a rank on a CPU, where the caller does not say: 128 MB in fp32."""
LOGITS_ON_ACCELERATOR = 2**29
"""The same on an accelerator, 3 GB with their fp32 softmax: it is bound by the weight and its
gradient, which every chunk reads and writes, and by the time that launching kernels takes."""
TOKENS_ON_ACCELERATOR = 2048
"""Tokens of a chunk on an accelerator, at least: fewer leave matrix products bound by memory."""


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
