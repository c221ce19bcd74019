"""One rank's view of the grid that a tensor lives in: sizes, coordinates of its axes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kenotron_dist.grid import DATA_AXES, MeshConfig, coords_of
from kenotron_dist.placement import TensorLayout


@dataclass(frozen=True)
class GridView:
    """A grid of ranks as one of them sees it."""

    sizes: Mapping[str, int]
    """Number of ranks along each axis, outermost first."""
    coords: Mapping[str, int]
    """Coordinates of this rank."""
    data: tuple[str, ...] = DATA_AXES["dense"]
    """Axes along which ranks have different tokens: gradients are summed over them."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(self.sizes)

    @classmethod
    def at(cls, sizes: Mapping[str, int], rank: int, grid: str = "dense") -> GridView:
        """Return the view of a global rank; the last axis of ``sizes`` varies fastest."""
        return cls(sizes, coords_of(sizes, rank), DATA_AXES[grid])

    def type_over(self, axis: str, layout: TensorLayout) -> Literal["V", "R", "I"]:
        """Return what a parameter is over an axis of its grid, as ``spmd_types`` calls it.

        V: cut, others on each rank; R: the same values, whose gradients are summed over the axis;
        I: the same values with the same whole gradients.
        """
        if any(shard.axis == axis for shard in layout.shards):
            return "V"
        return "R" if axis in (*self.data, *layout.partial_axes) else "I"


ViewOf = Callable[[TensorLayout], GridView]
"""Layout of a tensor -> view of the grid that it lives in (``mesh.view``)."""


def views_of(config: MeshConfig, rank: int) -> ViewOf:
    """Return what ``mesh.view`` is on a global rank of a mesh of these sizes.

    Raises:
        ValueError: ep does not divide the ranks of a stage; or (from the returned function) a
            tensor is placed on axes of both grids.
    """
    views = {
        "dense": GridView.at(config.sizes, rank),
        "expert": GridView.at(config.expert_sizes, rank, "expert"),
    }
    return lambda layout: views[layout.grid]
