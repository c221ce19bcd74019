"""Tokens of a sequence on each rank, and the fixed grid of blocks that attention uses.

The sequence (S tokens, padded to whole strips) is divided into T strips of equal length. A chunk is
a run of strips that one rank holds, and a strip is divided into blocks of at most ``block`` tokens.
Strips and blocks depend on S only (while 2 * ranks divides 16), so that partial results of blocks
are added in the same order on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_STRIPS = 16
"""Strips of a sequence where 2 * ranks divides it: the same for 1, 2, 4 and 8 ranks."""


class TokenBlock(NamedTuple):
    """Tokens ``begin`` to ``end`` (global positions, end not included) of the padded sequence."""

    begin: int
    end: int


class Strips(NamedTuple):
    """Strips ``first`` to ``first + count`` of the sequence, all on one rank."""

    first: int
    count: int


@dataclass(frozen=True)
class Layout:
    """Cut of a sequence over the ranks of an axis; the same value on all of them.

    Raises ValueError for an unknown order, and for sizes below 1.
    """

    order: Literal["zigzag", "contiguous"] = "zigzag"
    """``zigzag``: of 2c chunks rank i holds chunks i and 2c-1-i, which balances causal attention.
    ``contiguous``: rank i holds the i-th of c chunks."""
    strips: int | None = None
    """Strips of the sequence; None: 16 where 2c divides 16, else 2c."""
    block: int = 512
    """Largest number of tokens of a block, the unit of a kernel call."""

    def __post_init__(self) -> None:
        if self.order not in ("zigzag", "contiguous"):
            raise ValueError(f"Layout: order {self.order!r} is not zigzag or contiguous")
        for name, value in (("strips", self.strips), ("block", self.block)):
            if value is not None and value < 1:
                raise ValueError(f"Layout: {name} is {value}, it must be at least 1")

    def per_rank(self, ranks: int) -> int:
        """Return how many chunks each of so many ranks holds."""
        return 2 if ranks > 1 and self.order == "zigzag" else 1


@dataclass(frozen=True)
class Cut:
    """A sequence of ``sequence`` tokens cut over ``ranks`` ranks.

    Raises ValueError when a size is below 1, and when a chunk is not a power of two of strips.
    """

    sequence: int
    ranks: int
    layout: Layout = Layout()

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.ranks < 1:
            raise ValueError(
                f"Cut: sequence {self.sequence} and ranks {self.ranks} must be at least 1"
            )
        strips, chunks = self.strips, self.ranks * self.per_rank
        count = strips // chunks
        if strips % chunks or (self.ranks > 1 and count & (count - 1)):
            raise ValueError(
                f"Layout: {strips} strips do not fit {self.ranks} ranks: with the order "
                f"{self.layout.order} strips must be {chunks} times a power of two; leave strips "
                "out to have them chosen"
            )

    @cached_property
    def strips(self) -> int:
        """T."""
        if self.layout.strips is not None:
            return self.layout.strips
        return 2 * self.ranks if _STRIPS % (2 * self.ranks) else _STRIPS

    @property
    def per_rank(self) -> int:
        """Chunks that a rank holds."""
        return self.layout.per_rank(self.ranks)

    @property
    def strip_length(self) -> int:
        """Tokens of a strip, padding included."""
        return -(-self.sequence // self.strips)

    @property
    def padded(self) -> int:
        """Tokens of the sequence with padding, which lies at its end: whole strips."""
        return self.strips * self.strip_length

    @property
    def local(self) -> int:
        """Tokens that each rank holds, padding included. One rank alone has no padding."""
        return self.sequence if self.ranks == 1 else self.padded // self.ranks

    @property
    def chunk_length(self) -> int:
        """Tokens of a chunk, padding included."""
        return self.padded // (self.ranks * self.per_rank)

    @cached_property
    def chunks(self) -> tuple[Strips, ...]:
        """All chunks in the order of the sequence."""
        count = self.strips // (self.ranks * self.per_rank)
        return tuple(Strips(first, count) for first in range(0, self.strips, count))

    def held(self, rank: int) -> tuple[int, ...]:
        """Indices of the chunks that a rank holds, in the order of its tokens."""
        if self.per_rank == 2:
            return rank, 2 * self.ranks - 1 - rank
        return (rank,)

    def blocks(self, strip: int) -> list[TokenBlock]:
        """Blocks of a strip, in order."""
        length = self.strip_length
        size = -(-length // -(-length // self.layout.block))
        begin = strip * length
        edges = [*range(begin, begin + length, size), begin + length]
        return [TokenBlock(*pair) for pair in zip(edges, edges[1:], strict=False)]

    def positions(self, rank: int) -> Tensor:
        """Global positions of a rank's tokens, (local,) int64 on the CPU; from S on: padding."""
        if self.ranks == 1:
            return torch.arange(self.sequence, device="cpu")
        length = self.chunk_length
        begins = [chunk * length for chunk in self.held(rank)]
        return torch.cat([torch.arange(x, x + length, device="cpu") for x in begins])
