"""How ranks lie in a mesh: pure arithmetic, without a process or a group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Outermost to innermost: tp ranks are neighbours, pp stages lie far apart."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many ranks lie along each axis."""

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas that read different samples."""
    cp: int = 1
    """Parts of a sequence."""
    tp: int = 1
    """Parts of a layer."""

    @property
    def sizes(self) -> dict[str, int]:
        """The axes from outermost to innermost, with their sizes."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks in the whole mesh."""
        return math.prod(self.sizes.values())


def coords_of(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Coordinates of a global rank; the last axis of ``sizes`` varies fastest."""
    coords = {}
    for name in reversed(list(sizes)):
        rank, coords[name] = divmod(rank, sizes[name])
    return {name: coords[name] for name in sizes}


def rank_of(sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """Global rank at the given coordinates (axes left out are at 0)."""
    rank = 0
    for name, size in sizes.items():
        rank = rank * size + coords.get(name, 0)
    return rank


def lines(sizes: Mapping[str, int], names: Sequence[str]) -> list[tuple[int, ...]]:
    """All lines of global ranks along ``names`` together, outermost name first.

    The lines of one view are a partition of the world, listed by their lowest rank.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        coords = coords_of(sizes, rank)
        found.setdefault(tuple(c for n, c in coords.items() if n not in names), []).append(rank)
    return sorted(tuple(line) for line in found.values())


def line_through(sizes: Mapping[str, int], names: Sequence[str], rank: int) -> tuple[int, ...]:
    """The one line of ``lines(sizes, names)`` that holds ``rank``, without listing the others."""
    coords = coords_of(sizes, rank)
    along = {name: size for name, size in sizes.items() if name in names}
    return tuple(
        rank_of(sizes, {**coords, **coords_of(along, i)}) for i in range(math.prod(along.values()))
    )
