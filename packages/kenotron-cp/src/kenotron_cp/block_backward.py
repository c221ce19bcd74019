"""Gradients of queries and keys, block by block in the fixed order of the forward pass.

The gradient of a block of queries is a sum over strips of keys, that of a block of keys a sum over
strips of queries, both in a fixed tree. What a rank returns to the holder of a chunk of keys is the
sum over one of its own chunks of queries, which is a node of that tree.

B rows, H query heads, K key heads, n tokens of this rank, D features of a query or key, V of a
value. Tensors have heads first: (B, heads, tokens, features).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kenotron_cp.fixed_tree import FixedTree, level_of
from kenotron_cp.kernels import accumulated
from kenotron_cp.layout import TokenBlock
from kenotron_cp.partial import finite
from kenotron_cp.problem import Keys, Problem, keys_of, strips_of


def add(left: Tensor, right: Tensor) -> Tensor:
    """The sum of two of any shape, in the place of one that is no part of a buffer if there is one.

    The order of two numbers changes no bit of their sum.
    """
    return right.add_(left) if is_part(left) else left.add_(right)


def is_part(x: Tensor) -> bool:
    """Return whether the memory of a tensor holds more than its elements, which it keeps alive."""
    return x.untyped_storage().nbytes() > x.numel() * x.element_size()


def hold(x: Tensor) -> Tensor:
    """The tensor, of any shape, or a copy if it is a part of a buffer that shall be freed."""
    return x.clone(memory_format=torch.contiguous_format) if is_part(x) else x


class BlockBackward:
    """Gradients of this rank's queries, and of keys that this or other ranks hold.

    Args:
        p: the problem.
        q: (B, H, n, D).
        grad: gradient of the output, (B, H, n, V).
        out: the output, (B, H, n, V).
        lse: (B, H, n).
        kv_heads: K.
    """

    def __init__(
        self, p: Problem, q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, kv_heads: int
    ) -> None:
        self.p, self.kv_heads = p, kv_heads * p.copies
        self.dtype, self.wide = q.dtype, accumulated(q.dtype)
        dtype = p.kernel.dtype(q.dtype)
        self.q, self.grad, self.out = (x.to(dtype) for x in (q, grad, out))
        self.lse = finite(lse)
        table, top = p.table, (level_of(p.cut.strips), 0)
        self.blocks = [block for strip in p.strips() for block in table.blocks[strip]]
        self.dq = {i: FixedTree(table.seen[i], top, add) for i in self.blocks}
        self.dkv = {j: FixedTree(table.seeing[j], top, add, hold) for j in self.blocks}
        """Of this rank's keys, (B, K, tokens, D + V)."""

    def over(self, chunk: int, x: int, kv: Tensor, result: Tensor) -> None:
        """Differentiate the attention of a chunk of this rank's queries over a chunk of keys.

        Args:
            chunk: index of the chunk of keys.
            x: index of the chunk of queries.
            kv: keys and values, (B, K, tokens, D + V).
            result: zeros like ``kv`` in fp32 or fp64; filled with the gradient of ``kv``.
        """
        p, table = self.p, self.p.table
        length, top = p.cut.chunk_length, self._node(x)
        for w in strips_of(p, chunk):
            queries = [u for u in strips_of(p, x) if table.strip_sees(u, w)]
            if not queries:
                continue
            trees = {
                j: FixedTree(set(table.seeing[j]) & set(queries), top, add) for j in table.blocks[w]
            }
            keys = keys_of(p, kv, chunk, w, self.q.shape[1])
            for u in queries:
                for j, part in self._strips(u, w, keys).items():
                    trees[j].add(0, u, part)
            for j, tree in trees.items():
                part = tree.take()
                if part is not None:
                    result[:, :, j.begin % length : j.begin % length + part.shape[2]] = part

    def zeros(self, count: int) -> Tensor:
        """Room for the gradients of so many chunks of keys."""
        shape = (self.kv_heads, self.p.cut.chunk_length, self.p.depth + self.out.shape[-1])
        return self.q.new_zeros(count, len(self.q), *shape, dtype=self.wide)

    def over_own(self, own: Mapping[int, Tensor]) -> None:
        """The same for this rank's own chunks of keys, whose gradients are kept."""
        for m, x in self.p.table.returned(self.p.rank, self.p.rank):
            result = self.zeros(1)[0]
            self.over(m, x, own[m], result)
            self.keep(m, x, result)

    def _node(self, x: int) -> tuple[int, int]:
        """Node of the tree over strips that a chunk of queries is."""
        first, count = self.p.cut.chunks[x]
        return level_of(count), first >> level_of(count)

    def _strips(self, u: int, w: int, keys: Keys) -> dict[TokenBlock, Tensor]:
        """A strip of queries over a strip of keys; adds to dq and returns dkv by block."""
        p, table = self.p, self.p.table
        found: dict[TokenBlock, Tensor] = {}
        for i in table.blocks[u]:
            here, dq = p.place(i), None
            q, grad, out = (x[:, :, here] for x in (self.q, self.grad, self.out))
            for j in table.blocks[w]:
                if not table.sees(i, j):
                    continue
                tile = p.tile(i, j, q)
                lse = self.lse[:, :, here].contiguous()
                part, dk, dv = p.kernel.backward(grad, q, *keys.of(j), out, lse, tile)
                part = part.to(self.wide)
                dq = part if dq is None else dq.add_(part)
                dkv = torch.cat([self._per_kv_head(dk), self._per_kv_head(dv)], -1)
                found[j] = found[j].add_(dkv) if j in found else dkv
            if dq is not None:
                self.dq[i].add(0, w, dq)
        return found

    def _per_kv_head(self, x: Tensor) -> Tensor:
        """Sum the heads of each group, one after the other, (B, H, ...) -> (B, K, ...)."""
        first, *others = x.to(self.wide).unflatten(1, (self.kv_heads, -1)).unbind(2)
        for other in others:
            first = first + other
        return first

    def keep(self, chunk: int, x: int, dkv: Tensor) -> None:
        """Add the gradient of one of this rank's chunks of keys, from a chunk of queries.

        Nothing of ``dkv`` is kept: what has to wait for a neighbour in the tree is copied.
        """
        p, length = self.p, self.p.cut.chunk_length
        for w in strips_of(p, chunk):
            for j in p.table.blocks[w]:
                if any(p.table.sees(i, j) for u in strips_of(p, x) for i in p.table.blocks[u]):
                    begin = j.begin % length
                    part = dkv[:, :, begin : begin + j.end - j.begin]
                    self.dkv[j].add(*self._node(x), part)

    def take(self) -> tuple[Tensor, Tensor]:
        """Gradients of q (B, H, n, D) and of keys and values (B, K, n, D + V), in q's dtype.

        With ``Problem.copies`` each key head has so many: (B, K * copies, n, D + V).
        """
        p = self.p
        tokens, width = self.q.shape[2], p.depth + self.out.shape[-1]
        dq = self.q.new_zeros(self.q.shape, dtype=self.dtype)
        dkv = self.q.new_zeros(self.q.shape[0], self.kv_heads, tokens, width, dtype=self.dtype)
        for trees, whole in ((self.dq, dq), (self.dkv, dkv)):
            for block in self.blocks:
                found = trees.pop(block).take()
                if found is not None:
                    whole[:, :, p.place(block)] = found
        return dq, dkv
