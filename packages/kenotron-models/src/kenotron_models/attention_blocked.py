"""Attention by products of blocks: some queries with all the keys that one of them sees.

Nothing is computed for keys that no query of a block sees, so windows and documents save work.
Backward computes the probabilities of a block again: memory is that of a block, not S^2.

Shapes: B rows, S tokens of a row, H query heads, G key and value heads, R = H / G, K features of a
head; a block has n queries and m keys, its scores are (G, n * R, m).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_cp import Scoring
from kenotron_models.attention_mask import AttentionMask

ROWS = 1024  # n * R of a block: enough for products at full speed
QUERIES = (32, 256)  # bounds of n: a block computes n^2 / 2 scores in vain
SCORES = 1 << 20  # of the heads that are computed at once: they should stay in the cache


class ScoreBlock(NamedTuple):
    """Queries ``begin`` to ``end`` of a row, keys ``low`` to ``end``, heads ``heads``."""

    row: int
    heads: slice
    """Key and value heads."""
    begin: int
    end: int
    low: int
    """First key that the first query sees."""
    last: int
    """First key that the last query sees."""


class BlockShares(NamedTuple):
    """Softmax of a block's scores, and what its backward needs."""

    seen: Tensor
    """(G, n * R, m), 0 for keys that a query does not see."""
    slope: Tensor | None
    """Derivative of capped scores, of the same shape; None: 1."""
    sunk: Tensor | None
    """Share of the sinks, (G, n * R, 1); None: 0."""


def attend_blocks(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: AttentionMask, scoring: Scoring
) -> Tensor:
    """Made for the CPU; scores are rounded to the dtype of q: (B, S, H, K)."""
    return BlockedAttention.apply(q_BSHK, k_BSGK, v_BSGK, scoring.sinks, sight, scoring)


class BlockedAttention(torch.autograd.Function):
    """(q, k, v, sinks, sight, scoring) -> (B, S, H, K); once differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        sinks: Tensor | None,
        sight: AttentionMask,
        scoring: Scoring,
    ) -> Tensor:
        """Torch's own attention where nothing but the future is hidden, else by blocks."""
        ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGK, sinks)
        ctx.sight, ctx.scoring = sight, scoring
        if sight.whole and scoring.cap is None and sinks is None:
            q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
            grouped = q.shape[1] != k.shape[1]
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=grouped
            )
            return mixed.transpose(1, 2)
        k, v = by_head(k_BSGK, 1), by_head(v_BSGK, 1)
        ratio = q_BSHK.shape[2] // k_BSGK.shape[2]
        q = by_head(q_BSHK, ratio)
        out = torch.empty_like(q)
        scratch, sinks_GR = Scratch(q), by_group(sinks, ratio)
        for block in blocks(q_BSHK, ratio, k.shape[1], sight):
            asked, seen = parts(block, ratio)
            shares = probabilities(q[asked], k[seen], block, sight, scoring, sinks_GR, scratch)
            torch.bmm(shares.seen, v[seen], out=out[asked])
        return by_token(out, ratio)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        """Gradients of q, k, v and sinks; all but q's are added up in fp32 at least."""
        (grad_BSHK,), (q_BSHK, k_BSGK, v_BSGK, sinks) = grads, ctx.saved_tensors
        sight, scoring = ctx.sight, ctx.scoring
        ratio = q_BSHK.shape[2] // k_BSGK.shape[2]
        q, grad = by_head(q_BSHK, ratio), by_head(grad_BSHK, ratio)
        k, v = by_head(k_BSGK, 1), by_head(v_BSGK, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        scratch, sinks_GR = Scratch(q), by_group(sinks, ratio)
        dsinks = None if sinks_GR is None else torch.zeros_like(sinks_GR)
        for block in blocks(q_BSHK, ratio, k.shape[1], sight):
            asked, seen = parts(block, ratio)
            found = probabilities(q[asked], k[seen], block, sight, scoring, sinks_GR, scratch)
            shares = found.seen
            add_product(dv[seen], shares.transpose(1, 2), grad[asked], 1.0, scratch)
            back = scratch.take("back", *shares.shape)
            torch.bmm(grad[asked], v[seen].transpose(1, 2), out=back)
            if dsinks is not None and found.sunk is not None:
                mean = (back.to(wide) * shares).sum(-1, keepdim=True)
                own = (found.sunk * mean).unflatten(1, (-1, ratio))  # (G, n, R, 1)
                dsinks[block.heads] -= own.sum((1, 3))
            # The softmax's backward does not need shares that add up to 1.
            torch._softmax_backward_data(back, shares, -1, shares.dtype, grad_input=back)
            if found.slope is not None:
                back.mul_(found.slope)
            put_product(dq[asked], back, k[seen], scoring.scale)
            add_product(dk[seen], back.transpose(1, 2), q[asked], scoring.scale, scratch)
        return (
            by_token(dq, ratio),
            by_token(dk.to(k.dtype), 1),
            by_token(dv.to(v.dtype), 1),
            None if sinks is None or dsinks is None else dsinks.flatten().to(sinks.dtype),
            None,
            None,
        )


class Scratch:
    """Memory that is used again for the next block: fresh pages cost more than sums."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat: dict[str, Tensor] = {}
        self._future: dict[int, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Tensor of that shape; what the one of that name held is lost."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = self._like.new_empty(size)
        return flat[:size].view(shape)

    def future(self, queries: int) -> Tensor:
        """(n, n): minus infinity where the key is later than the query, else 0."""
        if queries not in self._future:
            hidden = self._like.new_full((queries, queries), -torch.inf)
            self._future[queries] = hidden.triu(1)
        return self._future[queries]


def blocks(q_BSHK: Tensor, ratio: int, kv_heads: int, sight: AttentionMask) -> Iterator[ScoreBlock]:
    """All blocks of queries (B, S, H, K), row by row."""
    batch, sequence = q_BSHK.shape[:2]
    size = min(max(ROWS // ratio, QUERIES[0]), QUERIES[1])
    seen = sight.blocks(size)
    for row in range(batch):
        for number, (low, last) in enumerate(seen[row % len(seen)]):
            begin = number * size
            end = min(begin + size, sequence)
            heads = max(SCORES // ((end - begin) * ratio * (end - low)), 1)
            for head in range(0, kv_heads, heads):
                yield ScoreBlock(row, slice(head, head + heads), begin, end, low, last)


def parts(block: ScoreBlock, ratio: int) -> tuple[tuple, tuple]:
    """Indices of its queries in (B, G, S * R, K), and of its keys in (B, G, S, K)."""
    asked = (block.row, block.heads, slice(block.begin * ratio, block.end * ratio))
    return asked, (block.row, block.heads, slice(block.low, block.end))


def by_group(sinks: Tensor | None, ratio: int) -> Tensor | None:
    """Return the sinks (H,) of each group of heads, (G, R), in fp32 at least."""
    if sinks is None:
        return None
    return sinks.to(torch.promote_types(sinks.dtype, torch.float32)).view(-1, ratio)


def probabilities(
    q: Tensor,
    k: Tensor,
    block: ScoreBlock,
    sight: AttentionMask,
    scoring: Scoring,
    sinks_GR: Tensor | None,
    scratch: Scratch,
) -> BlockShares:
    """Softmax of scores of q (G, n * R, K) and k (G, m, K), and what is needed of them."""
    scores, slope = scratch.take("scores", *q.shape[:2], k.shape[1]), None
    put_product(scores, q, k.transpose(1, 2), scoring.scale)
    if scoring.cap is not None:
        scores.div_(scoring.cap).tanh_()
        slope = scratch.take("slope", *scores.shape)
        torch.mul(scores, scores, out=slope)
        slope.neg_().add_(1)
        scores.mul_(scoring.cap)
    queries = block.end - block.begin
    scores_GnRm = scores.view(len(scores), queries, -1, scores.shape[-1])
    scores_GnRm[..., block.begin - block.low :].add_(scratch.future(queries)[:, None])
    if block.last > block.low:
        hidden = outside(block, sight)[:, None]
        scores_GnRm[..., : block.last - block.low].masked_fill_(hidden, -torch.inf)
    if sinks_GR is None:
        return BlockShares(torch.softmax(scores, -1, out=scores), slope, None)
    sinks = sinks_GR[block.heads].repeat(1, queries)[..., None]  # (G, n * R, 1)
    beyond = sinks - scores.to(sinks.dtype).logsumexp(-1, keepdim=True)
    shares = torch.softmax(scores, -1, out=scores)
    return BlockShares(shares.mul_((-beyond).sigmoid()), slope, beyond.sigmoid())


def outside(block: ScoreBlock, sight: AttentionMask) -> Tensor:
    """Bool (n, last - low): the key is before what the query sees."""
    first_BS = sight.first_BS
    assert first_BS is not None  # something but the future is hidden
    first = first_BS[block.row % len(first_BS), block.begin : block.end, None]
    return torch.arange(block.low, block.last, device=first.device) < first


def by_head(x_BSHK: Tensor, ratio: int) -> Tensor:
    """(B, S, G * R, K) -> (B, G, S * R, K), contiguous."""
    batch, sequence, _, width = x_BSHK.shape
    x_BSGRK = x_BSHK.unflatten(2, (-1, ratio))
    return x_BSGRK.transpose(1, 2).reshape(batch, -1, sequence * ratio, width).contiguous()


def by_token(x: Tensor, ratio: int) -> Tensor:
    """(B, G, S * R, K) -> (B, S, G * R, K)."""
    return x.unflatten(2, (-1, ratio)).transpose(1, 2).flatten(2, 3)


def put_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """``out = scale * a @ b``, batched: (G, rows, columns)."""
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, scratch: Scratch) -> None:
    """``total += scale * a @ b``, batched (G, rows, columns), summed in the dtype of ``total``."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b, alpha=scale)
    else:
        product = scratch.take("product", *total.shape)
        total.add_(torch.bmm(a, b, out=product), alpha=scale)
