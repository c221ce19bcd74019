"""Positions of ranks in a mesh: pure arithmetic, without a process or a group.

The ranks of a pipeline stage are factored twice: dp x cp x tp for dense tensors, and edp x ep x etp
for experts. Both keep the order of ranks. etp is 1: experts are cut no further.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Outermost to innermost: tp ranks are neighbours, pp stages lie far apart."""
EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""The same for the expert grid: the ranks that share all experts are neighbours."""
DATA_AXES = {"dense": ("dp", "cp"), "expert": ("edp",)}
"""By grid: the axes over which gradients are summed, since ranks have different tokens."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of ranks along each axis."""

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas that read different samples."""
    cp: int = 1
    """Parts of a sequence."""
    tp: int = 1
    """Parts of a layer."""
    ep: int = 1
    """Parts of the experts; divides dp * cp * tp."""

    @property
    def sizes(self) -> dict[str, int]:
        """The axes from outermost to innermost, with their sizes."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The axes of the expert grid. Raises ValueError unless ep divides dp * cp * tp."""
        ranks = self.dp * self.cp * self.tp
        if self.ep < 1 or ranks % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide the dp={self.dp} * cp={self.cp} * tp={self.tp} = "
                f"{ranks} ranks of a pipeline stage: choose a divisor of {ranks}"
            )
        return dict(zip(EXPERT_AXES, (self.pp, ranks // self.ep, self.ep, 1), strict=True))

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The axes of both grids: what placements may name. Raises as ``expert_sizes``."""
        return self.sizes | self.expert_sizes

    @property
    def world_size(self) -> int:
        """Number of ranks in the whole mesh."""
        return math.prod(self.sizes.values())


def check_sizes(config: MeshConfig, world: int) -> None:
    """Raise ValueError for an axis without ranks, and unless the product is that of the world."""
    for name, size in config.sizes.items():
        if size < 1:
            raise ValueError(f"{name} = {size}: an axis has at least one rank")
    if config.world_size != world:
        apart = world == config.world_size * config.ep
        hint = f"; ep = {config.ep} is a part of dp * cp * tp, not a further factor" * apart
        product = " * ".join(f"{name}={size}" for name, size in config.sizes.items())
        raise ValueError(
            f"{product} = {config.world_size}, but the world has {world} "
            f"rank{'s' if world > 1 else ''}: change the sizes or start {config.world_size} "
            f"processes{hint}"
        )


def grid_of(axes: Iterable[str], name: str) -> str:
    """Return the grid that has these axes, ``dense`` or ``expert``; dense where both have them.

    Raises:
        ValueError: some axis is of the one grid and some of the other; names the tensor.
    """
    used = set(axes)
    dense, expert = (sorted(used & set(own)) for own in (AXES[1:], EXPERT_AXES[1:]))
    if dense and expert:
        raise ValueError(
            f"{name}: placed on {', '.join(dense)} of the dense grid and on {', '.join(expert)} of "
            f"the expert grid: a tensor lives in one of them, so name axes of "
            f"{', '.join(AXES[1:])} or of {', '.join(EXPERT_AXES[1:])}"
        )
    return "expert" if expert else "dense"


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
    first = rank_of(sizes, {name: at for name, at in coords.items() if name not in names})
    along, stride = list[range](), 1
    for name in reversed(list(sizes)):
        if name in names:
            along.insert(0, range(0, sizes[name] * stride, stride))
        stride *= sizes[name]
    return tuple(first + sum(steps) for steps in itertools.product(*along))


def ring_phases(size: int) -> list[list[tuple[int, int]]]:
    """Neighbours on a ring of ``size`` places, in phases in which each place occurs at most once.

    An edge is (i, i + 1), and (size - 1, 0) closes the ring from 3 places up. Pure.
    """
    edges = [(i, i + 1) for i in range(size - 1)]
    phases = [edges[0::2], edges[1::2]]
    if size > 2:
        closing = (size - 1, 0)
        if size % 2:
            phases.append([closing])
        else:
            phases[1].append(closing)
    return [phase for phase in phases if phase]


def blocks_of(
    rank: int, ranks: int, size: int, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the block of consecutive ranks with this one, and the ranks at its place in all.

    Raises ValueError unless ``size`` divides ``ranks``; names the axis.
    """
    if size < 1 or ranks % size:
        raise ValueError(
            f"cannot cut {ranks} {name} ranks into blocks of {size}: choose a size that divides "
            f"{ranks}"
        )
    block, place = divmod(rank, size)
    return tuple(range(block * size, (block + 1) * size)), tuple(range(place, ranks, size))
