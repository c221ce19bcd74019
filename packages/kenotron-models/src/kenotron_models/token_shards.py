"""Tokens of a sample in virtual shards: experts compute those of each virtual rank of tp apart.

A sample's tokens are cut over n virtual ranks of tp, in their order. Each of t ranks has k = n/t of
the parts and computes them in turn, so every product has the rows that it has on n ranks.

Shapes: T tokens, s = T/n of a part, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Axis
from kenotron_tp import join_tokens, split_tokens


@dataclass(frozen=True)
class TokenShards:
    """Virtual ranks of tp as parts of a sample's tokens."""

    axis: Axis
    """tp."""
    count: int
    """n."""

    @property
    def own(self) -> int:
        """k."""
        return self.count // self.axis.size

    def split(self, x: Tensor, value: float = 0) -> tuple[Tensor, ...]:
        """Return this rank's k parts (s, ...) of x (T, ...), which is the same on all ranks.

        Parts that reach beyond T end with ``value``. An all-gather in backward.
        """
        missing = -len(x) % self.count
        padded = F.pad(x, (0, 0, 0, missing), value=value)
        return split_tokens(padded, self.axis).chunk(self.own)

    def each(
        self, function: Callable[..., Tensor], *of_tokens: Sequence[Tensor], tokens: int
    ) -> Tensor:
        """Return the results (T, ...) of all parts, the same on all ranks. One all-gather.

        Args:
            function: takes the number of a part among a rank's k, then the part of each of
                ``of_tokens``; returns (s, ...).
            of_tokens: k parts each, as ``split`` returns.
            tokens: T.
        """
        found = [function(i, *parts) for i, parts in enumerate(zip(*of_tokens, strict=True))]
        return join_tokens(torch.cat(found), self.axis)[:tokens]
