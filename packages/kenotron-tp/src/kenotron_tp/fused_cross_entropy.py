"""The output layer and the cross entropy in one: logits exist for a few tokens at a time.

Shapes: T tokens, n tokens of a rank, I input features, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import Axis, Handle, all_reduce
from kenotron_dist.autograd import all_gather_from
from kenotron_tp.autocast import cast_for_autocast, outside_autocast
from kenotron_tp.logit_cap import cap_slope, capped_logits, check_cap
from kenotron_tp.sequence import check_tokens, rows_of_rank
from kenotron_tp.softmax import (
    Statistics,
    Terms,
    checked_terms,
    local_statistics,
    losses,
    whole_statistics,
    write_gradient,
)


class Chunked(NamedTuple):
    """How the head is computed."""

    terms: Terms
    chunk: int
    whole: bool
    """Whether x is the same on all ranks: then its gradient is summed here."""
    cap: float | None = None
    """Of the logits; see ``logit_cap``."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, how: Chunked
    ) -> tuple[Tensor, Tensor]:
        parts = [
            local_statistics(capped_logits(tokens @ weight.t(), how.cap), own, how.terms)
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
            logits = capped_logits(x[rows] @ weight.t(), how.cap)
            slope = None if how.cap is None else cap_slope(logits, how.cap)
            of = Statistics(*(each[rows] for each in found))
            write_gradient(logits, logits, labels[rows], of, grads[0][rows], how.terms)
            if slope is not None:
                logits.mul_(slope)
            handle = _start_sum(logits @ weight, how) if needs_x else None
            if needs_weight:
                dw = added(dw, logits, x[rows], last=rows.stop >= len(x))
            _land(flight, dx)  # that of the chunk before, hidden behind these products
            flight = None if handle is None else (rows, handle)
        _land(flight, dx)
        if needs_weight and dw is None:  # no tokens
            dw = torch.zeros_like(weight)
        return dx, None if dw is None else dw.to(weight.dtype), None, None


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
        first = dy.t() @ x
        return first if last else first.to(torch.promote_types(first.dtype, torch.float32))
    if dy.dtype == total.dtype:
        return total.addmm_(dy.t(), x)
    return total.add_(dy.t() @ x)


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = ...,
    ignore_index: int = ...,
    z_loss: float = ...,
    label_smoothing: float = ...,
    chunk: int = ...,
    sequence_parallel: bool = ...,
    return_z_loss: Literal[False] = ...,
    cap: float | None = ...,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = ...,
    ignore_index: int = ...,
    z_loss: float = ...,
    label_smoothing: float = ...,
    chunk: int = ...,
    sequence_parallel: bool = ...,
    return_z_loss: Literal[True],
    cap: float | None = ...,
) -> tuple[Tensor, Tensor]: ...
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int = 1024,
    sequence_parallel: bool = False,
    return_z_loss: bool = False,
    cap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``vocab_parallel_cross_entropy`` of ``x W^T`` whose logits never exist at once.

    Arguments:
        x: (..., I), whole on every rank; (n, ..., I) under sequence parallelism.
        weight: (V/t, I), this rank's rows of the output layer.
        labels: (...) int64, all tokens; a row of x each.
        axis, vocab_size, ignore_index, z_loss, label_smoothing, return_z_loss: as there.
        chunk: tokens whose logits, (chunk, V/t), exist at a time.
        sequence_parallel: x is this rank's tokens (see ``sequence``); they are gathered here.
        cap: logits l are cap * tanh(l / cap), computed in fp32; None: they stay.

    Returns fp32 (...). Backward computes the logits once more: a third of the head's time for
    T/chunk of the memory. One all-gather of five numbers a position in forward, and an all-reduce
    of every chunk's gradient in backward, hidden behind the next products; under sequence
    parallelism an all-gather and a reduce-scatter. Raises ValueError when shapes do not fit or
    ``chunk`` or ``cap`` is not positive, IndexError as ``vocab_parallel_cross_entropy``.
    """
    check_cap(cap)
    x = head_inputs(x, weight, labels, axis, chunk, sequence_parallel=sequence_parallel)
    width = weight.shape[0]
    terms = checked_terms(labels, width, axis, vocab_size, ignore_index, z_loss, label_smoothing)
    x, weight, _ = cast_for_autocast(x, weight, None)
    rows, how = x.reshape(-1, x.shape[-1]), Chunked(terms, chunk, not sequence_parallel, cap)
    loss, z = _LinearCrossEntropy.apply(rows, weight, labels.reshape(-1), how)
    if return_z_loss:
        return loss.view(labels.shape), z.view(labels.shape)
    return loss.view(labels.shape)


def head_inputs(
    x: Tensor, weight: Tensor, labels: Tensor, axis: Axis, chunk: int, *, sequence_parallel: bool
) -> Tensor:
    """All tokens of x. Raises ValueError when shapes do not fit or ``chunk`` is not positive."""
    if chunk < 1:
        raise ValueError(f"chunk {chunk} is not positive: it is a number of tokens")
    if sequence_parallel:
        check_tokens(x)
        if rows_of_rank(len(labels), axis) != len(x):
            raise ValueError(
                f"{len(labels)} labels do not fit x {tuple(x.shape)} of {axis.size} ranks: labels "
                "are those of all tokens, x those of this rank"
            )
        x = all_gather_from(x, axis)[: len(labels)]
    if x.shape[:-1] != labels.shape or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit labels "
            f"{tuple(labels.shape)}: x is (..., I), weight (V/t, I), labels (...), all tokens "
            "unless sequence_parallel=True"
        )
    return x
