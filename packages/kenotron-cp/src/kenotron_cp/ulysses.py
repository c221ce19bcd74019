"""Ulysses: an all-to-all gives each rank the whole sequence of some heads, another one ends it.

arXiv 2309.14509. Key heads that are fewer than ranks are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kenotron_cp.kernels import accumulated
from kenotron_cp.layout import Cut
from kenotron_cp.sequence_cut import by_rank, in_order
from kenotron_dist import Axis, wide_tree_sum
from kenotron_dist.autograd import all_to_all


class _Repeat(torch.autograd.Function):
    """Each head ``times`` times; gradients of the copies are added in fp32, or in a tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int, in_tree: bool) -> Tensor:
        ctx.times, ctx.in_tree = times, in_tree
        return x.repeat_interleave(times, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        copies = grads[0].unflatten(2, (-1, ctx.times))
        if ctx.in_tree:
            return sum_of_copies(copies.unbind(3)), None, None
        return copies.sum(3, dtype=accumulated(copies.dtype)).to(copies.dtype), None, None


def sum_of_copies(parts: Sequence[Tensor]) -> Tensor:
    """Sum tensors of one shape and dtype in a binary tree, in fp32 at least; rounded once."""
    return wide_tree_sum(parts).to(parts[0].dtype)


def check_heads(heads: int, kv_heads: int, axis: Axis) -> None:
    """Raise ValueError where Ulysses cannot divide the heads over the axis."""
    c = axis.size
    if heads % c:
        raise ValueError(
            f"ulysses: {heads} query heads on {c} {axis.name} ranks: the ranks must divide the "
            "heads; use the way ring or gather, or fewer ranks"
        )
    if kv_heads % c and c % kv_heads:
        raise ValueError(
            f"ulysses: {kv_heads} key heads on {c} {axis.name} ranks: one must divide the other; "
            "use the way ring or gather, or another number of ranks"
        )


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, cut: Cut, copies: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads: one all-to-all over ``axis``, and one back in backward.

    Args:
        q: (B, n, H, D).
        k: (B, n, K, D).
        v: (B, n, K, V).
        axis: c ranks.
        cut: how the sequence lies on them.
        copies: of each key head that are sent, 1 where these are as many as are needed.

    Returns:
        (B, P, H / c, D) and twice (B, P, max(K / c, 1), ...): all P tokens of the padded sequence.
    """
    c = axis.size
    times = copies if copies > 1 else max(1, c // k.shape[2])
    k, v = (_Repeat.apply(x, times, copies > 1) if times > 1 else x for x in (k, v))
    qs, ks, vs = _exchanged([q, k, v], axis, cut)
    return qs, ks, vs


def sinks_to_heads(sinks: Tensor, axis: Axis, cut: Cut) -> Tensor:
    """Exchange sinks of own queries (B, n, H) for those of all queries of own heads (B, P, H / c).

    One all-to-all over ``axis``, and one back in backward.
    """
    [own] = _exchanged([sinks[..., None]], axis, cut)
    return own[..., 0]


def _exchanged(tensors: Sequence[Tensor], axis: Axis, cut: Cut) -> list[Tensor]:
    """Return (B, P, heads / c, features) of each of (B, n, heads, features). One all-to-all."""
    c, (batch, tokens) = axis.size, tensors[0].shape[:2]
    # One row for each rank: its heads of all tensors.
    parts = [x.unflatten(2, (c, -1)).movedim(2, 0).flatten(3) for x in tensors]
    rows = all_to_all(torch.cat(parts, -1), axis)  # (c, B, n, features)
    whole = in_order(rows.movedim(0, 1).reshape(batch, c * tokens, -1), 1, cut)
    split = whole.split([part.shape[-1] for part in parts], -1)
    return [x.unflatten(-1, (-1, y.shape[-1])) for x, y in zip(split, tensors, strict=True)]


def to_tokens(out: Tensor, axis: Axis, cut: Cut) -> Tensor:
    """Exchange heads for tokens: (B, P, H / c, V) -> (B, n, H, V), one all-to-all over ``axis``."""
    batch, heads = out.shape[0], out.shape[2]
    rows = by_rank(out, 1, cut).unflatten(1, (axis.size, -1)).movedim(1, 0)
    rows = all_to_all(rows.reshape(axis.size, batch, cut.local, -1), axis)  # (c, B, n, features)
    return rows.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
