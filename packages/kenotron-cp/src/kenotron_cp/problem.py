"""Inputs of attention for forward and backward: blocks, masks, dropout, keys of a strip.

B rows, H query heads, K key heads, G = H / K, D features of a query or key, V of a value. Tensors
have heads first: (B, heads, tokens, features).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kenotron_cp.kernels import Kernel, Tile
from kenotron_cp.layout import Cut, TokenBlock
from kenotron_cp.scoring import Scoring
from kenotron_cp.visibility import BlockTable


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs that are the same in forward and backward."""

    table: BlockTable
    rank: int
    """Rank whose tokens the queries are."""
    kernel: Kernel
    scoring: Scoring
    """Of the query heads here."""
    depth: int
    """D."""
    copies: int = 1
    """Parts of the query heads of each key head whose gradients of it are added apart."""

    @property
    def cut(self) -> Cut:
        """Layout of the sequence on ranks."""
        return self.table.cut

    def strips(self) -> list[int]:
        """Strips of this rank's queries, in the order of its tokens."""
        return [strip for x in self.cut.held(self.rank) for strip in strips_of(self, x)]

    def place(self, block: TokenBlock) -> slice:
        """Return the position of a block of queries among this rank's tokens."""
        length = self.cut.chunk_length
        index = self.cut.held(self.rank).index(block.begin // length)
        begin = index * length + block.begin % length
        return slice(begin, begin + block.end - block.begin)

    def tile(self, queries: TokenBlock, keys: TokenBlock, q: Tensor) -> Tile:
        """Mask and dropout of a pair of blocks; q (B, H, queries, D)."""
        table, dropout, kept = self.table, self.scoring.dropout, None
        if dropout is not None:
            places = (torch.arange(*block, device=q.device) for block in (queries, keys))
            kept = dropout.kept(q.shape[0], range(q.shape[1]), *places) * (1 / (1 - dropout.p))
        if table.causal(queries, keys):
            return Tile(self.scoring, True, None, kept)
        if table.whole(queries, keys):
            return Tile(self.scoring, False, None, kept)
        mask = table.sight.mask(queries, keys, self.cut.padded, q.device)
        return Tile(self.scoring, False, mask, kept)


class Keys(NamedTuple):
    """Keys and values of one strip as the kernel takes them, one for each query head."""

    begin: int
    k: Tensor
    v: Tensor

    def of(self, block: TokenBlock) -> tuple[Tensor, Tensor]:
        """Those of a block: (B, H, tokens, D) and (B, H, tokens, V)."""
        here = slice(block.begin - self.begin, block.end - self.begin)
        return self.k[:, :, here], self.v[:, :, here]


def keys_of(p: Problem, kv: Tensor, chunk: int, strip: int, heads: int) -> Keys:
    """Keys and values of a strip of a chunk, from kv (B, K, tokens, D + V)."""
    length = p.cut.strip_length
    begin = (strip - p.cut.chunks[chunk].first) * length
    part = kv[:, :, begin : begin + length].to(p.kernel.dtype(kv.dtype))
    part = part.repeat_interleave(heads // kv.shape[1], 1)
    k, v = part.split([p.depth, kv.shape[-1] - p.depth], -1)
    return Keys(strip * length, k.contiguous(), v.contiguous())


def strips_of(p: Problem, chunk: int) -> range:
    """Strips of a chunk, in order."""
    first, count = p.cut.chunks[chunk]
    return range(first, first + count)
