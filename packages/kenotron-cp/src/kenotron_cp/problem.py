"""What is attended to, as forward and backward see it: blocks, masks, dropout, keys of a strip.

B rows, H query heads, K key heads, G = H / K, D features of a query or key, V of a value. Tensors
have heads first: (B, heads, tokens, features).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kenotron_cp.kernels import Kernel, Tile
from kenotron_cp.layout import Block, Cut
from kenotron_cp.visibility import BlockTable

KeepMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(rows (B,), heads (H,), query positions (Q,), key positions (K,)) -> bool (B, H, Q, K)."""


class Dropout(NamedTuple):
    """Dropout of attention probabilities that depends on global coordinates only."""

    p: float
    """Probability of being dropped."""
    keep: KeepMask
    """A pure function of int64 tensors of indices: row of the batch, query head, global position
    of the query and of the key; True where a probability is kept."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is the same in forward and backward."""

    table: BlockTable
    rank: int
    """Whose tokens the queries are."""
    kernel: Kernel
    scale: float
    dropout: Dropout | None
    heads: Tensor
    """Global numbers of the query heads, (H,)."""
    depth: int
    """D."""
    cap: float | None = None
    """Of the scores; None: there is none."""

    @property
    def cut(self) -> Cut:
        """How the sequence lies on ranks."""
        return self.table.cut

    def strips(self) -> list[int]:
        """Strips of this rank's queries, in the order of its tokens."""
        return [strip for x in self.cut.held(self.rank) for strip in strips_of(self, x)]

    def place(self, block: Block) -> slice:
        """Where a block of queries lies among this rank's tokens."""
        length = self.cut.chunk_length
        index = self.cut.held(self.rank).index(block.begin // length)
        begin = index * length + block.begin % length
        return slice(begin, begin + block.end - block.begin)

    def tile(self, queries: Block, keys: Block, rows: int, device: torch.device) -> Tile:
        """Mask and dropout of a pair of blocks."""
        table, kept = self.table, None
        if self.dropout is not None:
            places = (torch.arange(*block, device=device) for block in (queries, keys))
            row = torch.arange(rows, device=device)
            kept = self.dropout.keep(row, self.heads.to(device), *places)
            kept = kept * (1 / (1 - self.dropout.p))
        if table.causal(queries, keys):
            return Tile(self.scale, True, None, kept, self.cap)
        if table.whole(queries, keys):
            return Tile(self.scale, False, None, kept, self.cap)
        mask = table.sight.mask(queries, keys, self.cut.padded, device)
        return Tile(self.scale, False, mask, kept, self.cap)


class Keys(NamedTuple):
    """Keys and values of one strip as the kernel takes them, one for each query head."""

    begin: int
    k: Tensor
    v: Tensor

    def of(self, block: Block) -> tuple[Tensor, Tensor]:
        """Those of a block."""
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
