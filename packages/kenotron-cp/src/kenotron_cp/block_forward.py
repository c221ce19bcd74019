"""Attention of this rank's queries over chunks of keys, block by block in a fixed order.

Keys arrive a few chunks at a time, in any order. What a block of queries gets from the blocks of
one strip is merged in their order; what it gets from strips, in a fixed tree over all strips. So
the bits of the result do not depend on who held the keys, nor on when they arrived.

B rows, H query heads, K key heads, n tokens of this rank, D features of a query or key, V of a
value. Tensors have heads first: (B, heads, tokens, features).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kenotron_cp.fixed_tree import FixedTree, level_of
from kenotron_cp.kernels import accumulated
from kenotron_cp.layout import TokenBlock
from kenotron_cp.partial import PartialAttention, merge
from kenotron_cp.problem import Keys, Problem, keys_of, strips_of


def forward(
    p: Problem, q: Tensor, arriving: Iterable[Mapping[int, Tensor]], width: int
) -> tuple[Tensor, Tensor]:
    """Attend to all chunks that arrive.

    Args:
        p: the problem.
        q: (B, H, n, D).
        arriving: chunks of keys and values (B, K, tokens, D + V) by index, some at a time.
        width: V.

    Returns:
        out (B, H, n, V) in the dtype of q, and lse (B, H, n) in fp32 or fp64.
    """
    table = p.table
    blocks = [block for strip in p.strips() for block in table.blocks[strip]]
    top = (level_of(p.cut.strips), 0)
    trees: dict[TokenBlock, FixedTree[PartialAttention]] = {
        i: FixedTree(table.seen[i], top, merge) for i in blocks
    }
    dtype, q = q.dtype, q.to(p.kernel.dtype(q.dtype))
    for chunks in arriving:
        _over_chunks(p, q, chunks, trees)
    out = q.new_zeros(*q.shape[:3], width, dtype=dtype)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulated(dtype))
    for i in blocks:
        found = trees.pop(i).take()
        if found is not None:
            out[:, :, p.place(i)], lse[:, :, p.place(i)] = found.out, found.lse
    return out, lse


def _over_chunks(
    p: Problem,
    q: Tensor,
    chunks: Mapping[int, Tensor],
    trees: Mapping[TokenBlock, FixedTree[PartialAttention]],
) -> None:
    """Attend to some chunks. No local variable keeps their buffer alive when the next one comes."""
    table, own = p.table, p.strips()
    for chunk, kv in chunks.items():
        for w in strips_of(p, chunk):
            queries = [u for u in own if table.strip_sees(u, w)]
            if not queries:
                continue
            keys = keys_of(p, kv, chunk, w, q.shape[1])
            for i in (i for u in queries for i in table.blocks[u]):
                part = _over_strip(p, q[:, :, p.place(i)], keys, i, w)
                if part is not None:
                    trees[i].add(0, w, part)


def _over_strip(
    p: Problem, q: Tensor, keys: Keys, queries: TokenBlock, strip: int
) -> PartialAttention | None:
    """Attention of a block of queries over a strip, its blocks in order."""
    found = None
    for j in p.table.blocks[strip]:
        if p.table.sees(queries, j):
            tile = p.tile(queries, j, q)
            part = p.kernel.forward(q, *keys.of(j), tile)
            found = part if found is None else merge(found, part)
    return found
