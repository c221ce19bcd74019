"""Cut of the rows of a micro-batch over the ranks of an axis (context parallelism).

Shapes: B rows of S tokens, n tokens of a row on this rank, padding included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kenotron_cp import AttentionWay, Cut, Layout
from kenotron_dist import Axis, to_device


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """Tokens of its rows that this rank has; equal on all ranks of the axis but for their own."""

    axis: Axis
    """The ranks over which rows are cut."""
    whole_positions_BS: Tensor
    """Positions of the whole rows, int64, on the host: documents begin where they say."""
    way: AttentionWay = "ring"
    """Method by which attention shares the work; see ``kenotron_cp.attend``."""
    layout: Layout = Layout()
    """Tokens of a row that each rank has."""
    stride: int = 1
    """Key heads that the way ``gather`` has at a time."""
    virtual: int = 1
    """C, virtual ranks of the axis (``virtual_chunks``); 1: there are none."""

    def copies(self, heads: int, kv_heads: int) -> int:
        """Return the copies of a key head that have a gradient each (``kenotron_cp.attend``).

        With virtual ranks bits are then the same on every number of ranks, and for every way.
        """
        needed = self.virtual // math.gcd(kv_heads, self.virtual)
        return math.gcd(needed, heads // kv_heads)

    @property
    def local(self) -> int:
        """Tokens of a row that attention of this rank reads; on one rank none is padding."""
        return Cut(self.sequence, self.axis.size, self.layout).local

    @property
    def sequence(self) -> int:
        """S."""
        return self.whole_positions_BS.shape[1]

    @cached_property
    def places_S(self) -> Tensor:
        """Numbers of this rank's tokens in their row, (n,) int64 on the host; from S on: padding.

        n is ``len(places_S)``. Those of one virtual rank follow those of another.
        """
        ranks = self.virtual if self.virtual > 1 else self.axis.size
        cut, each = Cut(self.sequence, ranks, self.layout), ranks // self.axis.size
        first = self.axis.rank * each
        return torch.cat([cut.positions(rank) for rank in range(first, first + each)])

    def real_tokens(self, device: torch.device) -> Tensor:
        """Numbers of this rank's tokens that are no padding, among its B * n, flat int64."""
        rows, width = len(self.whole_positions_BS), len(self.places_S)
        real = (self.places_S < self.sequence).nonzero().flatten()
        starts = torch.arange(rows, device=real.device) * width
        return to_device((starts[:, None] + real).flatten(), device)
