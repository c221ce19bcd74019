"""Options that the constructors of all layers take besides the layer's own sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from kenotron_dist import Axis
from kenotron_dist.placement import Chunk
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, TPMode

EP_ALONE = Axis.solo("ep")
"""Every rank has all experts."""


class Storage(TypedDict):
    """Device and dtype of parameters."""

    device: torch.device | str | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Build:
    """Options for making layers: mesh, communication, storage."""

    tp: Axis
    """The axis that features, heads and vocabulary are cut over."""
    mode: TPMode = TPMode()
    """Communication mode of cut layers over it."""
    device: torch.device | str | None = "meta"
    """Device of the parameters. On meta they take no memory: keep your own layers, ``to_empty``
    and initialise them. None: torch's default device."""
    dtype: torch.dtype | None = None
    """Number format of the parameters; None: torch's default."""
    ep: Axis = EP_ALONE
    """The axis that experts are cut over."""
    ep_chunks: int = 1
    """Parts in which tokens are sent over ep, one while another is computed; gradients of experts
    are equal to rounding. No effect on an axis of one rank."""
    shards: int = 1
    """Virtual shards of tp, a power of two that tp divides: blocks and vocabulary are computed as
    so many ranks would, and the bits do not depend on tp. 1: there are none."""
    cuts_between: bool = False
    """With virtual shards and without ``mode.sequence_parallel``: between blocks each rank holds
    its own tokens."""
    by_source: bool = False
    """Experts compute the tokens of each rank of ep as if alone, an expert at a time, and hand over
    the gradients of each by themselves (``kenotron_dist.separate_uses``): the bits do not depend on
    ep. ``ep_chunks`` and the way of an exchange have no effect then."""
    shapes_only: bool = False
    """Nothing will be computed: what computes need not be installed."""

    @property
    def storage(self) -> Storage:
        """Device and dtype as keyword arguments of a layer."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def own_shards(self) -> int:
        """Virtual shards of this rank."""
        return max(self.shards // self.tp.size, 1)

    @property
    def sequence_parallel(self) -> bool:
        """True where each rank holds its own tokens between cut layers."""
        return self.mode.sequence_parallel

    def column(
        self, inputs: int, outputs: int, *, bias: bool = False, chunks: Sequence[Chunk] = ()
    ) -> ColumnParallelLinear:
        """Make a linear layer whose output features are cut: (T, I) -> (T, O/t).

        Args:
            inputs: I.
            outputs: O, whole.
            bias: whether it has a bias.
            chunks: what O is a concatenation of; empty: one chunk.

        Raises:
            ValueError: the axis does not divide a chunk.
        """
        return ColumnParallelLinear(
            inputs, outputs, self.tp, bias=bias, chunks=chunks or None, **self.mode.column,
            **self.storage,
        )  # fmt: skip

    def row(self, inputs: int, outputs: int, *, bias: bool = False) -> RowParallelLinear:
        """Make a linear layer whose input features are cut: (T, I/t) -> (T, O).

        Args:
            inputs: I, whole.
            outputs: O.
            bias: whether it has a bias.

        Raises:
            ValueError: the axis does not divide I.
        """
        return RowParallelLinear(
            inputs, outputs, self.tp, bias=bias, **self.mode.row, **self.storage
        )
