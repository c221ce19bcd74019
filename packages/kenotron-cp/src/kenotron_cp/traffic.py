"""Bytes of an attention that leave a rank: a planner needs them, a recorder can check them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kenotron_cp.kernels import accumulated
from kenotron_cp.layout import Cut
from kenotron_cp.visibility import Visibility


class AttentionTraffic(NamedTuple):
    """Bytes that leave a rank."""

    forward: int
    backward: int


class AttentionSize(NamedTuple):
    """Sizes of an attention, of the whole model's heads on the ranks of the axis."""

    batch: int
    heads: int
    kv_heads: int
    depth: int
    """Features of a query or key."""
    width: int
    """Features of a value."""
    dtype: torch.dtype = torch.bfloat16


def attention_traffic(
    way: str, size: AttentionSize, sight: Visibility, cut: Cut, rank: int
) -> AttentionTraffic:
    """Return the bytes that leave a rank in one attention.

    With b bytes of a number, P padded tokens, B rows, K key heads and F = D + V features, the keys
    of one rank are a = B P / c K F b bytes. Causal attention on the zig-zag layout:

    * ring: between (c-1) a / 2 and (c-1) a forward, 3/4 (c-1) a on average; the same and (c-1) a in
      fp32 backward. A window or documents make it less.
    * gather: (c-1) a forward; the same and (c-1) a in fp32 backward.
    * ulysses: (c-1) / c of own q, k, v and output, forward and backward, with max(K, c) key heads.

    Raises ValueError for an unknown way.
    """
    if way not in ("ring", "gather", "ulysses"):
        raise ValueError(f"attention_traffic: way {way!r} is not ring, gather or ulysses")
    ranks, others = cut.ranks, [r for r in range(cut.ranks) if r != rank]
    if ranks == 1:
        return AttentionTraffic(0, 0)
    batch, heads, kv_heads, depth, width, dtype = size
    if way == "ulysses":
        keys = max(kv_heads, ranks) * (depth + width)
        features = heads * (depth + width) + keys
        moved = batch * cut.local * features * dtype.itemsize * (ranks - 1) // ranks
        return AttentionTraffic(moved, moved)
    table, chunk = sight.over(cut), batch * kv_heads * cut.chunk_length * (depth + width)
    returned = sum(len(table.returned(rank, r)) for r in others)
    if way == "ring":
        chunks = sum(len(table.sent(rank, r)) for r in others)
    else:
        chunks = len(others) * cut.per_rank
    forward = chunks * chunk * dtype.itemsize
    return AttentionTraffic(forward, forward + returned * chunk * accumulated(dtype).itemsize)
