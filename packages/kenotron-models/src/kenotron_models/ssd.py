"""Mamba-2's scan in its dual form (Dao and Gu, arXiv 2405.21060), chunk by chunk.

``h_t = exp(d_t a) h_(t-1) + d_t x_t B_t^T``, ``y_t = h_t C_t + D x_t`` for each head; a is one
number a head and ``d_t = softplus(step_t + bias)`` within limits. Within a chunk that is attention
with decays for a softmax; states pass from chunk to chunk. What a chunk computes is not kept: the
backward computes it again from the state at its begin, so memory is linear in S. All is fp32.

Shapes: R rows, L tokens of a row, Q tokens of a chunk, H heads of P features, G groups of K = H/G
heads that share B and C, N features of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_models.selective_scan import Constants, Scanned, spans_of

CHUNK = 64
"""Q: scores of a chunk are Q x Q for each head."""


class Masks(NamedTuple):
    """Masks of tokens (R, L), bool; None: True for all."""

    goes_on: Tensor | None
    """The token follows the one before it; else the state begins at 0."""
    real: Tensor | None
    """The token counts; others change no state."""

    def of(self, span: slice) -> Masks:
        """Return those of a chunk."""
        return Masks(*(each if each is None else each[:, span] for each in self))


def structured_scan(
    x: Tensor,
    step: Tensor,
    b: Tensor,
    c: Tensor,
    constants: Constants,
    *,
    limits: tuple[float, float] = (0.0, float("inf")),
    first: Tensor | None = None,
    goes_on: Tensor | None = None,
    real: Tensor | None = None,
    chunk: int = CHUNK,
) -> Scanned:
    """Compute outputs and the last state of rows.

    Args:
        x: (R, L, H, P).
        step: (R, L, H), before bias and softplus.
        b: B (R, L, G, N).
        c: C (R, L, G, N).
        constants: a (H,), negative; D (H,); the bias of steps (H,).
        limits: smallest and largest d.
        first: the state before each row (R, H, P, N), fp32; None: 0.
        goes_on: see ``Masks``.
        real: see ``Masks``.
        chunk: Q.

    Returns:
        y (R, L, H, P) in the dtype of x, the last state (R, H, P, N) and the sum of d (R, H).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if first is None:
        first = x.new_zeros(len(x), *x.shape[2:], b.shape[-1], dtype=wide)
    how = Masks(goes_on, real), limits, chunk
    return Scanned(*_ChunkedScan.apply(how, x, step, b, c, *constants, first))


class _ChunkedScan(torch.autograd.Function):
    """Keeps inputs and the states where chunks begin; each chunk's graph lives while it is used."""

    @staticmethod
    def forward(ctx: Any, how: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (masks, limits, size), tokens, constants, state = how, given[:4], given[4:7], given[7]
        y, elapsed, begins = torch.empty_like(given[0]), torch.zeros_like(state[..., 0, 0]), []
        for span in spans_of(y.shape[1], size):
            begins.append(state)
            parts = [each[:, span] for each in tokens]
            y[:, span], state, time = _chunk((*parts, *constants, state), masks.of(span), limits)
            elapsed = elapsed + time
        ctx.save_for_backward(*given[:7], *begins, *(m for m in masks if m is not None))
        ctx.there = [mask is not None for mask in masks]
        ctx.limits, ctx.size, ctx.count = limits, size, len(begins)
        return y, state, elapsed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        of_y, of_state, of_elapsed = grads
        saved, end = ctx.saved_tensors, 7 + ctx.count
        tokens, constants, begins = saved[:4], saved[4:7], saved[7:end]
        kept = iter(saved[end:])
        masks = Masks(*(next(kept) if there else None for there in ctx.there))
        outs = [torch.empty_like(each) for each in tokens]
        sums = [torch.zeros_like(each) for each in constants]
        spans = spans_of(of_y.shape[1], ctx.size)
        for span, begin in zip(reversed(spans), reversed(begins), strict=True):
            parts = [each[:, span] for each in tokens]
            leaves = [x.detach().requires_grad_() for x in (*parts, *constants, begin)]
            with torch.enable_grad():
                made = _chunk(leaves, masks.of(span), ctx.limits)
            back = torch.autograd.grad(made, leaves, (of_y[:, span], of_state, of_elapsed))
            for out, grad in zip(outs, back[:4], strict=True):
                out[:, span] = grad
            for total, grad in zip(sums, back[4:7], strict=True):
                total += grad
            of_state = back[7]
        return None, *outs, *sums, of_state


def _chunk(
    given: Sequence[Tensor], masks: Masks, limits: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: y (R, Q, H, P), the state after it, and the sum of d (R, H).

    ``given``: x, steps, B and C of the chunk, a, D, the bias of steps, and the state before it.
    """
    x, step, b, c, a, skip, bias, state = given
    wide, groups, dtype = state.dtype, b.shape[2], x.dtype
    x, b, c = x.to(wide), b.to(wide), c.to(wide)
    d = F.softplus(step.to(wide) + bias.to(wide)).clamp(*limits)
    if masks.real is not None:
        d = d * masks.real[..., None]
    log = (d * a.to(wide)).mT  # logarithms of factors (R, H, Q)
    decay, entering = _decays(log, masks.goes_on)
    fed = (d[..., None] * x).unflatten(2, (groups, -1))  # (R, Q, G, K, P)
    decay = decay.unflatten(1, (groups, -1))  # (R, G, K, Q, Q)
    # Tokens of the chunk, then what is left of the state before it.
    scores = torch.einsum("rlgn,rsgn->rgls", c, b)[:, :, None] * decay
    y = torch.einsum("rgkls,rsgkp->rlgkp", scores, fed)
    before = state.unflatten(1, (groups, -1))
    left = entering.unflatten(1, (groups, -1))  # (R, G, K, Q)
    y = y + torch.einsum("rlgn,rgkpn,rgkl->rlgkp", c, before, left)
    y = y.flatten(2, 3) + skip.to(wide)[:, None] * x
    last = torch.einsum("rgks,rsgkp,rsgn->rgkpn", decay[..., -1, :], fed, b)
    after = (last + left[..., -1, None, None] * before).flatten(1, 2)
    return y.to(dtype), after, d.sum(1)


def _decays(log: Tensor, goes_on: Tensor | None) -> tuple[Tensor, Tensor]:
    """Factors of token s in token l (R, H, Q, Q), and of the state before the chunk (R, H, Q).

    Sums are of exactly the tokens between, and no differences of longer ones: so they are accurate,
    and nothing of another document is in them.
    """
    size = log.shape[-1]
    places = torch.arange(size, device=log.device)
    after = places[:, None] > places  # l after s
    sums = log[..., None].expand(*log.shape, size).masked_fill(~after, 0.0).cumsum(-2)
    hidden, cut = places[:, None] < places, None
    if goes_on is not None:
        document = (~goes_on).cumsum(1)  # (R, Q)
        hidden = hidden | (document[:, :, None] != document[:, None]).unsqueeze(1)
        cut = (document > 0)[:, None]
    decay = torch.exp(sums.masked_fill(hidden, -torch.inf))
    whole = log.cumsum(-1)
    return decay, torch.exp(whole if cut is None else whole.masked_fill(cut, -torch.inf))
