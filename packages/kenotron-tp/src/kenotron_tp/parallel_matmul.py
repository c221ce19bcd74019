"""The two matrix products of cut layers, each with its communication, as autograd functions.

=======  ==================  =========================  ==========================
product  tokens              forward                    backward
=======  ==================  =========================  ==========================
column   whole               y = x W^T                  dx = all-reduce(dy W)
column   cut (sequence)      y = all-gather(x) W^T      dx = reduce-scatter(dy W)
row      whole               y = all-reduce(x W^T)      dx = dy W
row      cut (sequence)      y = reduce-scatter(x W^T)  dx = all-gather(dy) W
=======  ==================  =========================  ==========================

Shapes: T tokens, n tokens of a rank, I input and O output features of the local weight (O, I).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from kenotron_dist import Axis, Handle, WeightQueue, all_gather, all_reduce, reduce_scatter
from kenotron_dist.weight_products import accumulates, taker_of
from kenotron_tp.autocast import outside_autocast
from kenotron_tp.overlap import gather_product, start_product_scatter
from kenotron_tp.sequence import pad_rows


class How(NamedTuple):
    """How one call of a layer communicates."""

    axis: Axis
    parameter: nn.Parameter
    """The weight as the layer has it; the product may get a copy of another dtype (autocast)."""
    sequence: bool = False
    overlap: bool = False
    regather: bool = False
    rows: int = 0
    """Of the result, under sequence parallelism: T of a column product, n of a row product."""
    queue: WeightQueue | None = None
    """Where the weight's gradient is put off to."""


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    """x (T, I), or (n, I) when tokens are cut -> (T, O), this rank's features."""
    return _ColumnProduct.apply(x, weight, bias, how)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    """x (T, I), this rank's features -> the sum over ranks (T, O), or its own rows (n, O)."""
    return _RowProduct.apply(x, weight, bias, how)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        if not how.sequence:
            kept = x
            y = F.linear(x, weight, bias)
        elif how.overlap:
            y, rows = gather_product(x, weight.t(), how.axis, bias)
            y, kept = _first_rows(y, how.rows), x if how.regather else rows
        else:
            rows = all_gather(x, how.axis)
            y = F.linear(rows[: how.rows], weight, bias)
            kept = x if how.regather else rows
        ctx.save_for_backward(kept, weight)
        ctx.how, ctx.own = how, len(x)
        return y

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (dy,), (x, weight), how = grads, ctx.saved_tensors, ctx.how
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gathering = summing = dw = None
        if how.sequence and how.regather and needs_weight:
            gathering = all_gather(x, how.axis, async_op=True)
            if not how.overlap:
                gathering.wait()
        if needs_x:
            summing = _start_input_gradient(dy, weight, how, ctx.own)
            if not how.overlap:
                summing.wait()
        if needs_weight:
            rows = x if gathering is None else gathering.wait()
            dw = _weight_gradient(dy, rows[: len(dy)], how, _weight_node(ctx), summing)
        dx = None if summing is None else summing.wait()
        return dx, dw, dy.sum(0) if needs_bias else None, None


def _start_input_gradient(dy: Tensor, weight: Tensor, how: How, n: int) -> Handle:
    """Start dx (T, I), or (n, I) when tokens are cut, summed over ranks."""
    if how.sequence and how.overlap:
        return start_product_scatter(dy, weight, how.axis, n)
    dx = dy @ weight
    if how.sequence:
        return reduce_scatter(pad_rows(dx, n * how.axis.size), how.axis, async_op=True)
    return all_reduce(dx, how.axis, async_op=True)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        w, axis = weight.t(), how.axis
        ctx.save_for_backward(x, weight)
        ctx.how = how
        if axis.size == 1:  # as without a queue: one rounding of product and bias, not two
            return F.linear(x, weight, bias)
        if how.sequence and how.overlap:
            y = start_product_scatter(x, w, axis, how.rows).wait()
        elif how.sequence:
            y = reduce_scatter(pad_rows(x @ w, how.rows * axis.size), axis)
        else:
            y = all_reduce(x @ w, axis)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (dy,), (x, weight), how = grads, ctx.saved_tensors, ctx.how
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx, rows = None, dy
        if how.sequence and how.overlap and needs_x:
            dx, rows = gather_product(dy, weight, how.axis)
            dx = _first_rows(dx, len(x))
        else:
            if how.sequence:
                rows = all_gather(dy, how.axis)
            if needs_x:
                dx = rows[: len(x)] @ weight
        dw = _weight_gradient(rows[: len(x)], x, how, _weight_node(ctx)) if needs_weight else None
        return dx, dw, dy.sum(0) if needs_bias else None, None


def _weight_gradient(
    dy: Tensor, x: Tensor, how: How, node: Node, transfer: Handle | None = None
) -> Tensor | None:
    """dy^T x (O, I), or None when it is deferred or added up elsewhere.

    ``transfer`` travels and may need two rounds.
    """
    if how.queue is not None:
        dtype = how.parameter.dtype
        how.queue.push(how.parameter, lambda: (dy.t() @ x).to(dtype), (dy, x))
        return None
    taker = taker_of(how.parameter)
    if taker is not None and accumulates(node):
        taker([(dy, x)])
        return None
    if transfer is None or transfer.rounds == 1 or not how.overlap:
        return dy.t() @ x
    half = dy.shape[1] // 2
    dw = dy.new_empty(dy.shape[1], x.shape[1])
    torch.mm(dy[:, :half].t(), x, out=dw[:half])
    transfer.advance()
    torch.mm(dy[:, half:].t(), x, out=dw[half:])
    return dw


def _weight_node(ctx: Any) -> Node:
    """Where autograd takes the gradient of the weight, the second input of both products."""
    return ctx.next_functions[1][0]


def taken(parameter: nn.Parameter) -> bool:
    """Whether the weight's gradient is added up elsewhere; compiled programs leave it to autograd.

    So one program stands for all layers, without a break.
    """
    return not torch.compiler.is_compiling() and taker_of(parameter) is not None


def _first_rows(x: Tensor, n: int) -> Tensor:
    """The first n rows of storage of their own; to autograd no view, as results must be."""
    return x if len(x) == n else torch.ops.aten._unsafe_view(x[:n], (n, x.shape[1]))
