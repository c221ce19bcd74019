"""One interface for the three ways of attention over a cut sequence.

B rows, S tokens, n tokens of a rank, H query heads, K key heads, D features of a query or key, V
of a value, c ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kenotron_cp.block_backward import BlockBackward
from kenotron_cp.block_forward import forward
from kenotron_cp.gather import gather_backward, gather_forward
from kenotron_cp.kernels import PLAIN, Kernel, default_kernel
from kenotron_cp.layout import Cut, Layout
from kenotron_cp.problem import Problem
from kenotron_cp.ring import ring_backward, ring_forward
from kenotron_cp.scoring import Scoring
from kenotron_cp.sinks import gradient_of_sinks, with_sinks
from kenotron_cp.ulysses import (
    check_heads,
    sinks_to_heads,
    sum_of_copies,
    to_heads,
    to_tokens,
)
from kenotron_cp.visibility import Visibility
from kenotron_dist import Axis

AttentionWay = Literal["ring", "gather", "ulysses"]
"""Method of the exchange. ``ring``: keys, one all-to-all a step, hidden behind the products; in
backward again, and their gradients return in fp32. ``gather``: keys are gathered, some heads at a
time, and again in backward. ``ulysses``: each rank has the whole sequence of H / c heads, between
two all-to-alls; c divides H, and K or K divides c: key heads fewer than ranks are repeated."""
AROUND_KERNELS = frozenset({"sinks"})
"""Fields of ``Scoring`` that are applied to the result of any kernel."""


class _AttentionRun(NamedTuple):
    """Options of an attention once each rank has the heads that it computes."""

    p: Problem
    axis: Axis
    way: str
    stride: int

    def forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        if self.axis.size == 1:
            return forward(self.p, q, [{0: kv[0]}], kv.shape[-1] - self.p.depth)
        if self.way == "ring":
            return ring_forward(self.p, self.axis, q, kv)
        return gather_forward(self.p, self.axis, q, kv, self.stride)

    def backward(
        self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of queries, and of keys and values."""
        p, saved = self.p, (q, kv, out, lse)
        if self.axis.size == 1:
            work = BlockBackward(p, q, grad, out, lse, kv.shape[2])
            work.over_own({0: kv[0]})
            return work.take()
        if self.way == "ring":
            return ring_backward(p, self.axis, *saved, grad)
        return gather_backward(p, self.axis, *saved, grad, self.stride)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, run: _AttentionRun
    ) -> Tensor:
        q = q.transpose(1, 2).contiguous()
        if sinks is not None and sinks.ndim > 1:
            sinks = sinks.transpose(1, 2).contiguous()
        # By chunk, so that chunks are sent without a copy: (chunks, B, K, tokens, D + V).
        chunks = (run.p.cut.per_rank, run.p.cut.chunk_length)
        kv = torch.cat([k, v], -1).unflatten(1, chunks).permute(1, 0, 3, 2, 4).contiguous()
        out, lse = run.forward(q, kv)
        if sinks is not None:  # once, when all keys are in
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.run = run
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].transpose(1, 2).contiguous()
        q, kv, out, lse, sinks = ctx.saved_tensors
        dq, dkv = ctx.run.backward(q, kv, out, lse, grad)
        if (copies := ctx.run.p.copies) > 1:
            dkv = sum_of_copies(dkv.unflatten(1, (-1, copies)).unbind(2))
        dsinks = None if sinks is None else gradient_of_sinks(out, lse, grad, sinks)
        dsinks = dsinks.transpose(1, 2) if dsinks is not None and dsinks.ndim > 1 else dsinks
        depth = ctx.run.p.depth
        dk, dv = dkv.transpose(1, 2).split([depth, dkv.shape[-1] - depth], -1)
        return dq.transpose(1, 2), dk, dv, dsinks, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    sight: Visibility,
    scoring: Scoring | None = None,
    *,
    way: AttentionWay = "ring",
    layout: Layout = Layout(),
    kernel: Kernel | None = None,
    stride: int = 1,
    copies: int = 1,
) -> Tensor:
    """Exact attention over a sequence that is cut over the ranks of an axis.

    On one kind of device, outputs and gradients have the same bits on 1, 2, 4 and 8 ranks and for
    all ways (see the README for the two exceptions). A row of the result that sees nothing is 0.

    Args:
        q: (B, n, H, D), this rank's tokens as ``cut_sequence`` returns them.
        k: (B, n, K, D), where K divides H: query head h reads key head h // (H / K).
        v: (B, n, K, V).
        axis: the ranks over which the sequence is cut.
        sight: which tokens see which, of the whole sequence.
        scoring: what changes the scores; None: a scale of 1 / sqrt(D). The gradient of its sinks is
            that of this rank's queries: sum it. Sinks of each query have a gradient for each.
        way: which collectives run over ``axis``; see ``AttentionWay``.
        layout: that of ``cut_sequence``.
        kernel: attention of a pair of blocks; None: torch's for the device, or ``PLAIN`` for
            scorings, dtypes and features that torch's does not take.
        stride: key heads that the way ``gather`` has at a time.
        copies: a power of two that divides H / K. The gradient of a key head is that of so many
            copies, which are added in a tree: then its bits are those of ``ulysses``, too, where
            ranks share key heads. That way sends as many; c divides K times ``copies``.

    Returns:
        (B, n, H, V) in the dtype of ``q``. Partial results are added in fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes, dtypes or options that do not fit; heads that Ulysses cannot divide.
    """
    cut = Cut(sight.sequence, axis.size, layout)
    scoring = Scoring(q.shape[-1] ** -0.5) if scoring is None else scoring
    _check(q, k, v, scoring, axis, sight, cut)
    if way not in ("ring", "gather", "ulysses"):
        raise ValueError(f"attend: way {way!r} is not ring, gather or ulysses")
    if stride < 1:
        raise ValueError(f"attend: stride is {stride}, it must be at least 1")
    if (each := q.shape[2] // k.shape[2]) % max(copies, 1) or copies & (copies - 1) or copies < 1:
        raise ValueError(
            f"attend: copies is {copies}; it must be a power of two that divides the {each} query "
            "heads of a key head"
        )
    kernel = _kernel(kernel, q, v, scoring)
    p = Problem(sight.over(cut), axis.rank, kernel, scoring, q.shape[-1], copies)
    if axis.size > 1 and way != "ulysses":
        return _Attend.apply(q, k, v, scoring.sinks, _AttentionRun(p, axis, way, stride))
    return _whole_sequence(q, k, v, axis, p)


def _whole_sequence(q: Tensor, k: Tensor, v: Tensor, axis: Axis, p: Problem) -> Tensor:
    """Attention of some heads, or of all, over the whole sequence, as one rank computes it."""
    cut, sinks = p.cut, p.scoring.sinks
    of_queries = sinks is not None and sinks.ndim > 1
    alone = Cut(cut.sequence, 1, replace(cut.layout, strips=cut.strips))
    p = replace(p, table=p.table.sight.over(alone), rank=0)
    if axis.size == 1:
        missing = (0, 0, 0, 0, 0, alone.padded - cut.sequence)
        padded = (pad(x, missing) for x in (q, k, v))
        sinks = pad(sinks, missing[2:]) if of_queries else sinks
        run = _AttentionRun(p, axis, "ring", 1)
        return _Attend.apply(*padded, sinks, run)[:, : cut.sequence]
    check_heads(q.shape[2], k.shape[2] * p.copies, axis)
    heads = q.shape[2] // axis.size
    own = p.scoring.of_heads(axis.rank * heads, (axis.rank + 1) * heads)
    run = _AttentionRun(replace(p, scoring=own, copies=1), Axis.solo(axis.name), "ring", 1)
    whole = to_heads(q, k, v, axis, cut, p.copies)
    sinks = sinks_to_heads(sinks, axis, cut) if of_queries else own.sinks
    return to_tokens(_Attend.apply(*whole, sinks, run), axis, cut)


def _kernel(kernel: Kernel | None, q: Tensor, v: Tensor, scoring: Scoring) -> Kernel:
    """Return the kernel, or the one for these inputs; it applies what the scoring has."""
    if kernel is None:
        kernel = default_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
        if scoring.unsupported(kernel.supports | AROUND_KERNELS):
            kernel = PLAIN
    supported = kernel.supports | AROUND_KERNELS
    advice = "leave out kernel, or give PLAIN or another that supports it"
    scoring.check(f"attend: the kernel {kernel.name}", supported, advice)
    return kernel


def _check(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, axis: Axis, sight: Visibility, cut: Cut
) -> None:
    """Raise ValueError where shapes or dtypes do not fit."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if {x.ndim for x in (q, k, v)} != {4}:
        raise ValueError(f"attend: {shapes}: all must be (B, n, heads, features)")
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        found = ", ".join(str(x.dtype) for x in (q, k, v))
        raise ValueError(f"attend: q, k and v are {found}: they must have one floating dtype")
    if q.shape[1] != cut.local and q.shape[2] == k.shape[2] == cut.local:
        raise ValueError(
            f"attend: {shapes} look like torch's (B, heads, n, features), since a rank has "
            f"{cut.local} tokens: give q.transpose(1, 2) and so on, (B, n, heads, features)"
        )
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"attend: {shapes}: they must be (B, n, H, D), (B, n, K, D) and (B, n, K, V)"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attend: {q.shape[2]} query heads and {k.shape[2]} key heads: each key head must "
            "serve equally many query heads"
        )
    for name, value in scoring.per_head().items():
        if value.shape not in (q.shape[2:3], q.shape[:3]):
            raise ValueError(
                f"attend: {name} {tuple(value.shape)} for {q.shape[2]} query heads: give one each"
            )
    if q.shape[1] != cut.local:
        raise ValueError(
            f"attend: {q.shape[1]} tokens; a sequence of {cut.sequence} on {axis.size} "
            f"{axis.name} ranks has {cut.local} a rank: cut it with cut_sequence and the same "
            "layout"
        )
    if sight.rows not in (1, q.shape[0]):
        raise ValueError(
            f"attend: sight has documents of {sight.rows} rows and q has {q.shape[0]} rows: give "
            "one row of documents for all, or one each"
        )
