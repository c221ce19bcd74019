"""Visibility of tokens by global positions, and what follows for blocks, strips and chunks.

A query at position p sees the keys from its first visible position to p itself. The first visible
position does not decrease along a row, so the ends of two blocks say whether one sees the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kenotron_cp.layout import Cut, TokenBlock
from kenotron_dist import to_device


@dataclass(frozen=True, eq=False)
class Visibility:
    """Causal attention within S tokens, with an optional window and separate documents.

    Make one per micro-batch and use it in all layers: what is derived from it is kept in it.
    Equal on all ranks of the axis. Raises ValueError when a size is below 1, and for documents of
    another shape or dtype.
    """

    sequence: int
    """S, without padding."""
    window: int | None = None
    """Tokens that a token sees at most, itself included; None: no bound."""
    documents: Tensor | None = None
    """Document of every token of the whole sequence, integers, (S,) or (B, S), on the CPU. A token
    sees its own document only, which is a run of equal numbers. A token with a negative number
    sees nothing, is seen by none, and its output is 0."""
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """Tables derived so far."""

    def __post_init__(self) -> None:
        for name, value in (("sequence", self.sequence), ("window", self.window)):
            if value is not None and value < 1:
                raise ValueError(f"Visibility: {name} is {value}, it must be at least 1")
        ids = self.documents
        if ids is not None and (
            ids.ndim not in (1, 2)
            or ids.shape[-1] != self.sequence
            or ids.is_floating_point()
            or ids.dtype == torch.bool
        ):
            raise ValueError(
                f"Visibility: documents are {ids.dtype} {tuple(ids.shape)}; they must be integers "
                f"of shape ({self.sequence},) or (B, {self.sequence}): one for each token of the "
                "whole sequence, before the cut"
            )

    @classmethod
    def of_lengths(cls, lengths: list[int], window: int | None = None) -> Visibility:
        """Documents of these lengths, one after the other, in every row.

        Raises ValueError when there is none, or an empty one.
        """
        if min(lengths, default=0) < 1:
            raise ValueError(
                f"Visibility: document lengths {lengths} must be one or more, from 1 on"
            )
        ids = torch.arange(len(lengths), device="cpu")
        ids = ids.repeat_interleave(torch.tensor(lengths, device="cpu"))
        return cls(sum(lengths), window, ids)

    @property
    def rows(self) -> int:
        """Rows that differ in what they see: 1 or B."""
        return 1 if self.documents is None or self.documents.ndim == 1 else len(self.documents)

    def first(self, length: int, device: torch.device | None = None) -> Tensor:
        """First visible position of each of ``length`` positions, int64, (1 or B, length).

        A position that sees nothing, as padding does, has its own plus 1.
        """
        device = torch.device("cpu") if device is None else device
        name = ("first", length, device)
        if name not in self.known:
            cpu = torch.device("cpu")
            made = self._first(length) if device == cpu else to_device(self.first(length), device)
            self.known[name] = made
        return self.known[name]

    def _first(self, length: int) -> Tensor:
        places = torch.arange(length, device="cpu")
        first = torch.zeros(self.rows, length, dtype=torch.int64, device="cpu")
        if self.documents is not None:
            ids = self.documents.cpu().view(-1, self.sequence)
            # Where a document begins its own position is noted, else 0: the running maximum is the
            # start of the document that each position is in. A position of padding sees nothing.
            new = torch.ones_like(ids, dtype=torch.bool)
            new[:, 1:] = ids[:, 1:] != ids[:, :-1]
            here = places[: self.sequence]
            starts = torch.where(new, here, 0).cummax(1).values
            first[:, : self.sequence] = torch.where(ids < 0, here + 1, starts)
        if self.window is not None:
            first = torch.maximum(first, places - self.window + 1)
        first[:, self.sequence :] = places[self.sequence :] + 1
        return first

    def mask(
        self, queries: TokenBlock, keys: TokenBlock, length: int, device: torch.device
    ) -> Tensor:
        """True where a query sees a key, (1 or B, 1, queries, keys)."""
        first = self.first(length, device)[:, queries.begin : queries.end, None]
        q = torch.arange(queries.begin, queries.end, device=device)[:, None]
        k = torch.arange(keys.begin, keys.end, device=device)
        return ((k >= first) & (k <= q))[:, None]

    def dense_mask(self) -> Tensor:
        """The mask of the whole sequence, (1 or B, 1, S, S): for tests of short sequences."""
        whole = TokenBlock(0, self.sequence)
        return self.mask(whole, whole, self.sequence, torch.device("cpu"))

    def over(self, cut: Cut) -> BlockTable:
        """Return what is visible on the grid of a cut. Raises ValueError when S differs."""
        if cut.sequence != self.sequence:
            raise ValueError(
                f"Visibility: it describes {self.sequence} tokens and the cut {cut.sequence}: both "
                "are of the whole sequence"
            )
        if cut not in self.known:
            self.known[cut] = BlockTable(self, cut)
        return self.known[cut]


class BlockTable:
    """Visibility among blocks, strips and chunks of a cut sequence."""

    def __init__(self, sight: Visibility, cut: Cut) -> None:
        self.sight, self.cut = sight, cut
        self.blocks = [cut.blocks(strip) for strip in range(cut.strips)]
        """Blocks of each strip."""
        every = [block for blocks in self.blocks for block in blocks]
        first = sight.first(cut.padded)
        # First visible positions do not decrease: the least of a block is at its first token, the
        # greatest at its last; over rows, the extremes are kept.
        low = first.amin(0)[[block.begin for block in every]].tolist()
        high = first.amax(0)[[block.end - 1 for block in every]].tolist()
        self._low, self._high = (dict(zip(every, values, strict=True)) for values in (low, high))
        self._strips: dict[tuple[int, int], bool] = {}
        self._chunks: dict[tuple[int, int], bool] = {}

    @cached_property
    def seen(self) -> dict[TokenBlock, set[int]]:
        """Strips of which a block of queries sees a key."""
        return {
            i: {w for w in range(u + 1) if any(self.sees(i, j) for j in self.blocks[w])}
            for u, queries in enumerate(self.blocks)
            for i in queries
        }

    @cached_property
    def seeing(self) -> dict[TokenBlock, set[int]]:
        """Strips of which a query sees a block of keys."""
        many = len(self.blocks)
        return {
            j: {u for u in range(w, many) if any(self.sees(i, j) for i in self.blocks[u])}
            for w, keys in enumerate(self.blocks)
            for j in keys
        }

    def sees(self, queries: TokenBlock, keys: TokenBlock) -> bool:
        """Return whether a query of one block may see a key of another."""
        sequence = self.sight.sequence
        return (
            queries.begin < sequence
            and keys.begin < min(queries.end, sequence)
            and keys.end > self._low[queries]
        )

    def whole(self, queries: TokenBlock, keys: TokenBlock) -> bool:
        """Return whether every query sees every key."""
        return keys.end <= queries.begin + 1 and keys.begin >= self._high[queries]

    def causal(self, queries: TokenBlock, keys: TokenBlock) -> bool:
        """Return whether the block is its own keys, and nothing but the future is hidden."""
        return queries == keys and queries.begin >= self._high[queries]

    def strip_sees(self, queries: int, keys: int) -> bool:
        """Return whether a query of one strip may see a key of another."""
        pair = queries, keys
        if pair not in self._strips:
            rows, columns = self.blocks[queries], self.blocks[keys]
            self._strips[pair] = keys <= queries and any(
                self.sees(i, j) for i in rows for j in columns
            )
        return self._strips[pair]

    def chunk_sees(self, queries: int, keys: int) -> bool:
        """Return whether a query of one chunk may see a key of another."""
        pair = queries, keys
        if pair not in self._chunks:
            held = (self.cut.chunks[chunk] for chunk in pair)
            rows, columns = (range(each.first, each.first + each.count) for each in held)
            self._chunks[pair] = any(self.strip_sees(u, w) for u in rows for w in columns)
        return self._chunks[pair]

    def sent(self, source: int, to: int) -> list[int]:
        """Chunks of rank ``source`` that some query of rank ``to`` sees, in order."""
        held = self.cut.held
        return [m for m in held(source) if any(self.chunk_sees(x, m) for x in held(to))]

    def returned(self, source: int, to: int) -> list[tuple[int, int]]:
        """(key chunk of ``to``, query chunk of ``source``) whose gradients ``source`` returns."""
        held = self.cut.held
        return [(m, x) for m in held(to) for x in held(source) if self.chunk_sees(x, m)]
