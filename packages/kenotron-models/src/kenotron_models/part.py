"""Interface between a block and its mixer and feed-forward, of any kind.

A kind is one file: a frozen config (``PartSpec``), its module (``Part``), and what the config says
of it: cost and operations. Placements and roles are on the module; what the backward keeps is
measured on the module (``memory``), so its ``forward`` runs on device meta.

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kenotron_cp import AttentionWay, Cut
from kenotron_dist.init import Initializer
from kenotron_models.build import Build
from kenotron_models.context import Context

Normed = Callable[[Tensor], Tensor]
"""A norm that a part applies to its input: (T, D) -> (T, D)."""


class Part(nn.Module):
    """A mixer or a feed-forward of a block.

    ``forward(x, context, norm=None)``: (T, D) -> (T, D). With ``norm`` it is applied to x first,
    and what is cheap to compute again is not kept for the backward.
    """

    reads_cache: ClassVar[bool] = False
    """True where a mixer keeps in ``context.cache`` what it needs of earlier tokens."""
    cuts_sequence: ClassVar[bool] = False
    """True where it is right on rows that are cut over ranks (``context.cut``): it treats each
    token alone, or exchanges what tokens need of one another."""

    in_shards: bool = False
    """True where it is computed in virtual shards of tp (``Build.shards``): as ranks that compute
    alone up to one sum, that of their outputs, or with ``adds_inside`` up to two."""

    @property
    def adds_inside(self) -> bool:
        """Return True where ranks of tp add up inside, too: virtual shards call ``begin``."""
        return False

    def begin(
        self, x: Tensor, context: Context, *, norm: Normed | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Compute up to the sum inside. Arguments are those of ``forward``.

        Returns:
            What ranks of tp add up, of any shape, and what makes the output (T, D) of what
            ``of_sum`` returns.
        """
        raise AssertionError(f"{type(self).__name__} adds up nothing inside")

    def of_sum(self, total: Tensor, ranks: int) -> Tensor:
        """Return what all of ``ranks`` ranks of tp read of ``total``, the sum of any shape."""
        raise AssertionError(f"{type(self).__name__} adds up nothing inside")

    computed_again: bool = False
    """True where the backward computes all of it again; its block sets it."""

    def prepare(self, context: Context) -> None:
        """Make what all layers read of the micro-batch, before a compiled ``forward``."""

    def leave_out_of_programs(self) -> None:
        """Mark what ``torch.compile`` must call and not look into."""


class PartSpec(Protocol):
    """The config of a kind of mixer or feed-forward: frozen, hashable."""

    name: ClassVar[str]
    """Name of its module in a block, the same for all configs of the kind."""

    def build(self, width: int, build: Build, layer: int) -> Part:
        """Make the module. Arguments: D; how and where; the block's number from 0."""
        ...

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations of one forward besides products with weight matrices."""
        ...

    def cost(self, width: int) -> int:
        """Count multiply-adds a token, to balance pipeline stages."""
        ...


@runtime_checkable
class SendsOverSequence(Protocol):
    """Protocol of configs of mixers that need tokens of other ranks."""

    def sent_over_sequence(
        self, rows: int, cut: Cut, way: AttentionWay, *, tp: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes that leave the first rank of cp in forward and in backward.

        Args:
            rows: B.
            cut: how rows are cut.
            way: how the work is shared.
            tp: ranks over which heads are cut.
            dtype: of activations.
        """
        ...


@runtime_checkable
class Sparse(Protocol):
    """Protocol of configs of parts in which a token uses only some matrices."""

    def idle(self, width: int) -> int:
        """Count the elements of the matrices that a token does not use."""
        ...


@runtime_checkable
class HasFirstValues(Protocol):
    """Protocol of configs of parts that have their own initialisation of parameters."""

    def first_values(self, name: str) -> Initializer | None:
        """Return the first values of a parameter, by its name in the module; None: by its role."""
        ...
