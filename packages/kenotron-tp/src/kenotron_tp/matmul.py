"""The product of a layer: alone, or cut over ranks with its communication, forward and backward.

| product | tokens         | forward                   | backward                  |
|---------|----------------|---------------------------|---------------------------|
| column  | whole          | y = x W^T                 | dx = all-reduce(dy W)     |
| column  | cut (sequence) | y = all-gather(x) W^T     | dx = reduce-scatter(dy W) |
| row     | whole          | y = all-reduce(x W^T)     | dx = dy W                 |
| row     | cut (sequence) | y = reduce-scatter(x W^T) | dx = all-gather(dy) W     |

Shapes: T tokens, n tokens of a rank, I input and O output features of the local weight (O, I).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from kenotron_dist import Axis, Handle, WeightQueue, all_gather, all_reduce, reduce_scatter
from kenotron_dist.weight_products import accumulates, taker_of
from kenotron_tp.autocast import cast_for_autocast, outside_autocast
from kenotron_tp.overlap import gather_product, start_product_scatter
from kenotron_tp.products import product, project
from kenotron_tp.sequence import pad_rows


class How(NamedTuple):
    """Cut of the weight in one call, and what travels."""

    axis: Axis
    cut: Literal["column", "row"]
    """``column``: along the output's features; ``row``: along the input's."""
    lead: tuple[int, ...]
    """Leading dims of the result, all tokens or the rank's own."""
    sequence: bool = False
    """True where tokens are cut: x of a column, the result of a row product."""
    overlap: bool = False
    """True where communication travels while pieces are multiplied."""
    regather: bool = False
    """True where gathered tokens are gathered again in backward and not kept."""
    queue: WeightQueue | None = None
    """Queue that the weight's gradient is put off to."""


class _ProductCall(NamedTuple):
    how: How
    parameter: nn.Parameter
    """The weight as the layer has it; the product may get a copy of another dtype (autocast)."""
    rows: int
    """Of the result."""


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, how: How | None = None) -> Tensor:
    """Return ``x W^T + b`` (..., O), as autocast would; on a cut weight with its communication.

    Args:
        x: (..., I); of a column product under sequence parallelism (n, ..., I).
        weight: (O, I), this rank's part; with ``how`` the parameter of a layer.
        bias: (O,); of a row product it is added once, after the sum.
        how: None: nothing is cut, or no rank needs what another one has.
    """
    if how is None:
        return project(x, weight, bias)
    parameter = cast("nn.Parameter", weight)
    x, local, bias = cast_for_autocast(x, weight, bias)
    if how.axis.size == 1 and how.queue is None and not _taken(parameter):
        return project(x, local, bias)
    call = _ProductCall(how, parameter, math.prod(how.lead))
    function = _ColumnProduct if how.cut == "column" else _RowProduct
    y = function.apply(x.reshape(-1, x.shape[-1]), local, bias, call)
    return y.view(*how.lead, y.shape[-1])


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _ProductCall
    ) -> Tensor:
        how = call.how
        if not how.sequence:
            kept = x
            y = product(x, weight.t(), bias)
        elif how.overlap:
            y, rows = gather_product(x, weight.t(), how.axis, bias)
            y, kept = _first_rows(y, call.rows), x if how.regather else rows
        else:
            rows = all_gather(x, how.axis)
            y = product(rows[: call.rows], weight.t(), bias)
            kept = x if how.regather else rows
        ctx.save_for_backward(kept, weight)
        ctx.call, ctx.own = call, len(x)
        return y

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (dy,), (x, weight), how = grads, ctx.saved_tensors, ctx.call.how
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
            dw = _weight_gradient(dy, rows[: len(dy)], ctx.call, _weight_node(ctx), summing)
        dx = None if summing is None else summing.wait()
        return dx, dw, dy.sum(0) if needs_bias else None, None


def _start_input_gradient(dy: Tensor, weight: Tensor, how: How, n: int) -> Handle:
    """Start dx (T, I), or (n, I) when tokens are cut, summed over ranks."""
    if how.sequence and how.overlap:
        return start_product_scatter(dy, weight, how.axis, n)
    dx = product(dy, weight)
    if how.sequence:
        return reduce_scatter(pad_rows(dx, n * how.axis.size), how.axis, async_op=True)
    return all_reduce(dx, how.axis, async_op=True)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _ProductCall
    ) -> Tensor:
        how = call.how
        w, axis = weight.t(), how.axis
        ctx.save_for_backward(x, weight)
        ctx.call = call
        if axis.size == 1:  # as without a queue: one rounding of product and bias, not two
            return product(x, w, bias)
        if how.sequence and how.overlap:
            y = start_product_scatter(x, w, axis, call.rows).wait()
        elif how.sequence:
            y = reduce_scatter(pad_rows(product(x, w), call.rows * axis.size), axis)
        else:
            y = all_reduce(product(x, w), axis)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (dy,), (x, weight), how = grads, ctx.saved_tensors, ctx.call.how
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx, rows = None, dy
        if how.sequence and how.overlap and needs_x:
            dx, rows = gather_product(dy, weight, how.axis)
            dx = _first_rows(dx, len(x))
        else:
            if how.sequence:
                rows = all_gather(dy, how.axis)
            if needs_x:
                dx = product(rows[: len(x)], weight)
        dw = None
        if needs_weight:
            dw = _weight_gradient(rows[: len(x)], x, ctx.call, _weight_node(ctx))
        return dx, dw, dy.sum(0) if needs_bias else None, None


def _weight_gradient(
    dy: Tensor, x: Tensor, call: _ProductCall, node: Node, transfer: Handle | None = None
) -> Tensor | None:
    """dy^T x (O, I), or None when it is deferred or added up elsewhere.

    ``transfer`` travels and may need two rounds.
    """
    how, parameter = call.how, call.parameter
    if how.queue is not None:
        dtype = parameter.dtype
        how.queue.push(parameter, lambda: product(dy.t(), x).to(dtype), (dy, x))
        return None
    taker = taker_of(parameter)
    if taker is not None and accumulates(node):
        taker([(dy, x)])
        return None
    if transfer is None or transfer.rounds == 1 or not how.overlap:
        return product(dy.t(), x)
    half = dy.shape[1] // 2
    dw = dy.new_empty(dy.shape[1], x.shape[1])
    product(dy[:, :half].t(), x, out=dw[:half])
    transfer.advance()
    product(dy[:, half:].t(), x, out=dw[half:])
    return dw


def _weight_node(ctx: Any) -> Node:
    """Return the node at which autograd takes the weight's gradient, the second input of both."""
    return ctx.next_functions[1][0]


def _taken(parameter: nn.Parameter) -> bool:
    """Return whether the weight's gradient is added up elsewhere; compiled programs use autograd.

    So one program stands for all layers, without a break.
    """
    return not torch.compiler.is_compiling() and taker_of(parameter) is not None


def _first_rows(x: Tensor, n: int) -> Tensor:
    """The first n rows of storage of their own; to autograd no view, as results must be."""
    return x if len(x) == n else torch.ops.aten._unsafe_view(x[:n], (n, x.shape[1]))
