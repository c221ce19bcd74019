"""The output layer and the summed cross entropy in one, gradients included.

A sum has one gradient for all tokens, so what it is times is all that the backward has to add: the
gradients of x and W are made while the logits of a chunk are there, which are computed once. (For a
loss of every token see ``linear_cross_entropy``.)

Shapes: T tokens, n tokens of a rank, I input features, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import Axis, all_reduce
from kenotron_tp.autocast import cast_for_autocast, outside_autocast
from kenotron_tp.head import Chunked, added, head_inputs
from kenotron_tp.softmax import (
    checked_terms,
    local_statistics,
    losses,
    whole_statistics,
    write_gradient,
)

LOGITS_AT_A_TIME = 2**25
"""Logits of a rank where the caller does not say: 128 MB in fp32."""


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, how: Chunked, times: float
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dtype = torch.promote_types(x.dtype, torch.float32)
        loss, z = x.new_zeros((), dtype=dtype), x.new_zeros((), dtype=dtype)
        dx = torch.empty_like(x) if needs_x else None
        dw: Tensor | None = None
        for start in range(0, len(x), how.chunk):
            rows = slice(start, start + how.chunk)
            tokens, own = x[rows], labels[rows]
            logits = tokens @ weight.t()
            found = whole_statistics(
                local_statistics(logits, own, how.terms), len(weight), how.terms
            )
            each = losses(found, own, how.terms)
            loss, z = loss + each[0].sum(), z + each[1].sum()
            if needs_x or needs_weight:
                of_each = torch.full_like(each[0], times)
                write_gradient(logits, logits, own, found, of_each, how.terms)
            if dx is not None:
                part = logits @ weight
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
            raise RuntimeError("linear_cross_entropy_sum has one backward: its gradients are gone")
        dx, dw = (None if each is None else each.mul_(grads[0].to(each.dtype)) for each in made)
        return dx, dw, None, None, None


def linear_cross_entropy_sum(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    times: float = 1.0,
    chunk: int | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum over the labels of the cross entropy of ``x W^T``, and of the z-loss in it: fp32 scalars.

    Arguments: as ``linear_cross_entropy``'s; ``chunk`` None: as many tokens as have 2^25 logits on
    a rank. The sums are multiplied with ``times``, one over the number of labels say: gradients are
    made so, which float16 needs. The z-loss has no gradient of its own.

    The gradients of x and W are made in forward and kept for backward, which multiplies them: the
    logits are computed once, and only those of a chunk ever exist. In forward an all-gather of five
    numbers a position and an all-reduce of every chunk's gradient; under sequence parallelism an
    all-gather, and in backward a reduce-scatter. Raises as ``linear_cross_entropy``.
    """
    width = weight.shape[0]
    size = max(LOGITS_AT_A_TIME // max(width, 1), 1) if chunk is None else chunk
    x = head_inputs(x, weight, labels, axis, size, sequence_parallel=sequence_parallel)
    terms = checked_terms(labels, width, axis, vocab_size, ignore_index, z_loss, label_smoothing)
    x, weight, _ = cast_for_autocast(x, weight, None)
    how = Chunked(terms, size, not sequence_parallel)
    rows = x.reshape(-1, x.shape[-1])
    return _LinearCrossEntropySum.apply(rows, weight, labels.reshape(-1), how, times)
