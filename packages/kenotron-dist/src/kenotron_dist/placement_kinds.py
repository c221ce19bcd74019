"""Placements of a tensor along one axis or dimension."""

from __future__ import annotations

from dataclasses import dataclass

from kenotron_dist.grid import DATA_AXES


@dataclass(frozen=True)
class Chunk:
    """One piece of a concatenated dimension (q, k or v of a fused weight), cut by itself."""

    size: int
    """Logical elements along the dimension."""
    parts: int | None = None
    """Indivisible pieces (heads). Fewer than ranks: each piece lives on several ranks."""
    pad: int = 0
    """Elements after ``size`` that exist locally and are no part of the logical tensor."""


@dataclass(frozen=True)
class Shard:
    """Dimension ``dim`` is cut over mesh axis ``axis``, each chunk evenly and by itself.

    The local tensor is the concatenation of this rank's part of every chunk.
    """

    axis: str
    dim: int
    chunks: tuple[Chunk, ...] | None = None
    """Default: one chunk, the whole dimension."""


@dataclass(frozen=True)
class Partial:
    """The value is the same along ``axis``; the gradient must be summed over it."""

    axis: str


@dataclass(frozen=True)
class Tie:
    """This parameter *is* logical tensor ``name``: gradients of all its owners are summed."""

    name: str


@dataclass(frozen=True)
class FlatSlice:
    """Elements ``start`` to ``stop`` of the flattened local tensor, a different range on every
    rank of ``axes`` (ZeRO)."""

    start: int
    stop: int
    axes: tuple[str, ...] = DATA_AXES["dense"]
    block: int | None = None
    """Consecutive ranks of the first axis whose ranges differ; further blocks of so many have the
    same ones (hybrid sharding). None: all of them."""


@dataclass(frozen=True)
class Fused:
    """Dimension ``dim`` is a concatenation of matrices of these sizes (gate and up of stacked
    experts; of size 1 in dimension 0: a stack of them). It cuts nothing; a ``Shard`` that cuts such
    a dimension has ``chunks`` instead."""

    dim: int
    sizes: tuple[int, ...]


Placement = Shard | Partial | Tie | FlatSlice | Fused
"""Cut of one parameter of a module; several cuts are a tuple, outermost axis first."""
Placements = dict[str, Placement | tuple[Placement, ...]]
"""A module's ``placements``: parameter name -> one, or several from the outermost axis in."""
