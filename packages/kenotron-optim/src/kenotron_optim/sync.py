"""The sums that placements ask for before gradients are reduced over data-parallel ranks.

Everything is derived from the layouts once: ``Partial`` gradients are summed over their axis, kv
heads that live on several ranks over those ranks, tied tensors over their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_dist import Axis, Mesh, broadcast, tree_sum
from kenotron_dist.boxes import Box, gradient_sums
from kenotron_dist.gradients import sum_views
from kenotron_dist.placement import TensorLayout

Read = Callable[[str, TensorLayout], Tensor]
"""(parameter name, layout) -> its accumulated gradient, in the parameter's shape."""
Write = Callable[[str, Tensor], None]
"""(logical name, gradient): replaces what is accumulated."""


@dataclass(frozen=True)
class _TiedGradient:
    """One tied tensor: who contributes, in the order of the sum."""

    layout: TensorLayout
    owners: tuple[tuple[str, int], ...]
    """(parameter, index along ``axis`` of the stage that holds it), sorted by name."""
    axis: Axis


class GradientSync:
    """Runs the sums of one stage.

    Collective over the mesh: groups are made here, in one order on all ranks.

    Args:
        whole: layouts of the whole model by parameter name.
        own: this stage's parameter that stands for each logical name.
        mesh: the mesh.
    """

    def __init__(
        self, whole: Mapping[str, TensorLayout], own: Mapping[str, str], mesh: Mesh
    ) -> None:
        self._ties = _ties(whole, mesh)
        axes = {
            (group.axis, group.parts): mesh.subaxis(group.axis, group.parts)
            for _, layout in sorted(whole.items())
            for group in gradient_sums(layout, mesh.view(layout))
        }
        self.names = {tied.layout.name for tied in self._ties} | {
            layout.name for layout in whole.values() if gradient_sums(layout, mesh.view(layout))
        }
        """Logical names of tensors whose gradient some sum changes."""
        self.pairs = {
            tied.layout.name: tied.layout.owners
            for tied in self._ties
            if len(tied.owners) == 2
            and tied.axis.size == 1
            and not gradient_sums(tied.layout, mesh.view(tied.layout))
        }
        """Owners of tied tensors of which this stage has both, and that no other sum changes."""
        self._partial: list[tuple[Axis, list[tuple[str, TensorLayout, tuple[Box, ...]]]]] = []
        for key, axis in axes.items():
            members = [
                (path, whole[path], group.boxes)
                for path in own.values()
                for group in gradient_sums(whole[path], mesh.view(whole[path]))
                if (group.axis, group.parts) == key
            ]
            if members:
                self._partial.append((axis, members))

    def run(self, read: Read, write: Write, done: Container[str]) -> None:
        """Replace accumulated gradients by their sums. Collective over the mesh.

        ``done``: tied tensors whose owners have been added up.
        """
        self.run_ties(read, write, done)
        for axis, members in self._partial:
            _sum_boxes(axis, members, read, write)

    def run_ties(self, read: Read, write: Write, done: Container[str]) -> None:
        """Replace those of tied tensors alone; see ``run``."""
        for tied in self._ties:
            if tied.layout.name not in done:
                write(tied.layout.name, _sum_owners(tied, read))


def _ties(whole: Mapping[str, TensorLayout], mesh: Mesh) -> list[_TiedGradient]:
    """Tied tensors this stage owns. All ranks make all groups, in the order of the names."""
    found = []
    tied = {layout.name: layout for layout in whole.values() if len(layout.owners) > 1}
    for _, layout in sorted(tied.items()):
        axis = mesh.subset("pp", layout.stages)
        if axis is None:
            continue
        at = [layout.stages.index(stage) for stage in layout.owner_stages]
        owners = tuple(zip(layout.owners, at, strict=True))
        found.append(_TiedGradient(layout, owners, axis))
    return found


def _sum_owners(tied: _TiedGradient, read: Read) -> Tensor:
    """Sum over owners in the order of their names, the same additions on every layout."""
    own = {path: read(path, tied.layout) for path, at in tied.owners if at == tied.axis.rank}
    like = next(iter(own.values()))
    rows = torch.stack(
        [
            broadcast(own[path] if path in own else torch.empty_like(like), tied.axis, at)
            for path, at in tied.owners
        ]
    )
    return tree_sum(rows)


def _sum_boxes(
    axis: Axis,
    members: list[tuple[str, TensorLayout, tuple[Box, ...]]],
    read: Read,
    write: Write,
) -> None:
    """One all-reduce for the blocks of all tensors that are partial over the same ranks."""
    gradients = {layout.name: read(path, layout) for path, layout, _ in members}
    views = [box.of_local(gradients[layout.name]) for _, layout, boxes in members for box in boxes]
    sum_views(views, axis)
    for name, gradient in gradients.items():
        write(name, gradient)
