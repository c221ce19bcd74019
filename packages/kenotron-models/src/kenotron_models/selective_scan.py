"""The selective scan of Mamba (Gu and Dao, arXiv 2312.00752), in chunks of tokens.

``h_t = exp(d_t A) h_(t-1) + d_t x_t B_t``, ``y_t = h_t C_t + D x_t`` for each channel, where
``d_t = softplus(step_t + bias)``. States of all tokens would be N times as large as the input: they
exist for one chunk at a time, and the backward computes them again from the state at the chunk's
begin. Memory is linear in S, and everything between input and output is fp32.

Shapes: R rows, L tokens of a row, Q tokens of a chunk, C channels, N features of a channel's state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 32
"""Q: the state at every Q-th token is kept for the backward: N / Q of what the input has."""


class Scanned(NamedTuple):
    """The result of ``selective_scan``."""

    y: Tensor
    """(R, L, C), in the dtype of x."""
    state: Tensor
    """h after the last token (R, C, N), fp32."""
    elapsed: Tensor
    """Sum of d over all tokens (R, C), fp32: without a reset ``exp(elapsed A)`` is the factor of
    the first state in the last one."""


class Constants(NamedTuple):
    """Learned values that do not depend on tokens."""

    a: Tensor
    """A (C, N), negative."""
    skip: Tensor
    """D (C,)."""
    bias: Tensor
    """Added to steps (C,)."""


def selective_scan(
    x: Tensor,
    step: Tensor,
    b: Tensor,
    c: Tensor,
    constants: Constants,
    *,
    first: Tensor | None = None,
    goes_on: Tensor | None = None,
    real: Tensor | None = None,
    chunk: int = CHUNK,
) -> Scanned:
    """Compute outputs and the last state of rows.

    Args:
        x: (R, L, C).
        step: (R, L, C), before bias and softplus.
        b: B (R, L, N).
        c: C (R, L, N).
        constants: A, D and the bias of steps.
        first: the state before each row (R, C, N), fp32; None: 0.
        goes_on: whether a token follows the one before it (R, L), bool; where it does not, the
            state begins at 0. None: all do.
        real: which tokens count (R, L), bool: others change no state. None: all do.
        chunk: Q.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if first is None:
        first = x.new_zeros(len(x), x.shape[2], b.shape[2], dtype=wide)
    masks = goes_on, real
    return Scanned(*_Scan.apply(x, step, b, c, *constants, first, masks, chunk))


class _ScannedChunk(NamedTuple):
    """One chunk in fp32, tokens first: (Q, R, ...)."""

    x: Tensor
    step: Tensor
    """Before the softplus."""
    d: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    """(N, C)."""
    factor: Tensor
    """exp(d A) (Q, R, N, C), 0 where the state begins again."""
    real: Tensor | None
    """(Q, R, 1)."""


class _Scan(torch.autograd.Function):
    """Chunks follow one another; within one, a loop over tokens has one product each.

    States are (R, N, C) here: what does not depend on features or on channels is then repeated
    over long runs of memory, which is several times as fast as over N numbers.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, step, b, c, a, skip, bias, first, masks, size = given
        state, begins = first.mT.contiguous(), []
        y, elapsed = torch.empty_like(x), torch.zeros_like(first[..., 0])
        for span in spans_of(x.shape[1], size):
            begins.append(state)
            part = _chunk(given, span)
            states = _states(part, state)
            state = states[-1].clone()
            out = (part.c[:, :, None] @ states)[:, :, 0] + part.x * skip.to(part.x.dtype)
            y[:, span] = out.transpose(0, 1).to(x.dtype)
            elapsed = elapsed + part.d.sum(0)
        ctx.save_for_backward(x, step, b, c, a, skip, bias, *begins, *_there(masks))
        ctx.kinds, ctx.chunks, ctx.size = [m is not None for m in masks], len(begins), size
        return y, state.mT.contiguous(), elapsed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        of_y, of_state, of_elapsed = grads[0], grads[1].mT, grads[2]
        saved, count = ctx.saved_tensors, ctx.chunks
        inputs, begins, kept = saved[:7], saved[7 : 7 + count], list(saved[7 + count :])
        masks = tuple(kept.pop(0) if there else None for there in ctx.kinds)
        given = (*inputs, None, masks, ctx.size)
        outs = [torch.empty_like(each) for each in inputs[:4]]
        sums = [torch.zeros_like(each, dtype=of_state.dtype) for each in inputs[4:]]
        spans = spans_of(of_y.shape[1], ctx.size)
        for span, begin in zip(reversed(spans), reversed(begins), strict=True):
            part = _chunk(given, span)
            states = _states(part, begin)
            grad_y = of_y[:, span].transpose(0, 1).to(part.x.dtype)
            g, of_state = _of_states(part, grad_y, of_state)
            of_c = (states @ grad_y[..., None])[..., 0]
            # d(log factor) = g_t h_(t-1) factor_t, in place of the factors.
            log = part.factor
            log[1:] *= states[:-1]
            log[0] *= begin
            log *= g
            values, added = _of_inputs(part, grad_y, (g, log), given, of_elapsed)
            for out, value in zip(outs, (*values, of_c), strict=True):
                out[:, span] = value.transpose(0, 1).to(out.dtype)
            for total, each in zip(sums, added, strict=True):
                total += each
        constants = (s.to(each.dtype) for s, each in zip(sums, inputs[4:], strict=True))
        return (*outs, *constants, of_state.mT, None, None)


def _of_states(part: _ScannedChunk, grad_y: Tensor, of_last: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a chunk's states (Q, R, N, C), and of the one before them (R, N, C)."""
    g = grad_y[:, :, None] * part.c[..., None]
    g[-1] += of_last
    if not g.is_meta:
        for i in range(len(g) - 2, -1, -1):  # each passes on through the next token's factor
            g[i].addcmul_(part.factor[i + 1], g[i + 1])
    return g, part.factor[0] * g[0]


def _of_inputs(
    part: _ScannedChunk,
    grad_y: Tensor,
    of_states: tuple[Tensor, Tensor],
    given: Any,
    of_elapsed: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a chunk's x, step and B, tokens first, and its share of A's, D's and bias's.

    ``of_states``: gradients of states, and of logarithms of factors; these are overwritten.
    """
    (g, log), skip = of_states, given[5].to(grad_y.dtype)
    of_a = _sum_of_products(log, part.d)
    of_fed = (part.b[:, :, None] @ g)[:, :, 0]  # of d x
    of_d = log.mul_(part.a).sum(2) + of_fed * part.x + of_elapsed
    of_step = of_d * torch.sigmoid(part.step)
    if part.real is not None:
        of_step = of_step * part.real
    fed = part.d * part.x
    values = [of_fed * part.d + grad_y * skip, of_step, (g @ fed[..., None])[..., 0]]
    return values, [of_a.mT, (grad_y * part.x).sum((0, 1)), of_step.sum((0, 1))]


def _sum_of_products(log: Tensor, d: Tensor) -> Tensor:
    """Return the sum of log d over tokens and rows (N, C), without a product as large as log."""
    total = torch.zeros_like(log[0])
    if not log.is_meta:
        for of_token, step in zip(log, d, strict=True):
            total.addcmul_(of_token, step[:, None])
    return total.sum(0)


def _there(masks: tuple[Tensor | None, Tensor | None]) -> list[Tensor]:
    return [mask for mask in masks if mask is not None]


def spans_of(length: int, size: int) -> list[slice]:
    """Return the chunks of a row: ``size`` tokens each, the last one with what is left."""
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def _chunk(given: Any, span: slice) -> _ScannedChunk:
    """Inputs of one chunk, and the factors of its states."""
    x, step, b, c, a, _, bias, _, (goes_on, real), _ = given
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = [each[:, span].transpose(0, 1).to(wide) for each in (x, step, b, c)]
    raw = parts[1] + bias.to(wide)
    d = F.softplus(raw)
    if real is not None:
        real = real[:, span].t()[..., None]
        d = d * real
    a = a.to(wide).mT.contiguous()
    factor = (d[:, :, None] * a).exp_()
    if goes_on is not None:
        factor *= goes_on[:, span].t()[..., None, None]
    return _ScannedChunk(parts[0], raw, d, parts[2], parts[3], a, factor, real)


def _states(part: _ScannedChunk, begin: Tensor) -> Tensor:
    """States after each token (Q, R, N, C)."""
    states = (part.d * part.x)[:, :, None] * part.b[..., None]
    if not states.is_meta:  # there nothing is computed: a loop would only take time
        before = begin
        for factor, state in zip(part.factor, states, strict=True):
            state.addcmul_(factor, before)
            before = state
    return states
