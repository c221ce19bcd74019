"""A rank's mesh without processes: the groups that it would make are noted, and none is made."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kenotron_dist.fake_world import FAKE
from kenotron_dist.grid import MeshConfig
from kenotron_dist.in_flight import CallsInFlight
from kenotron_dist.mesh import Mesh
from kenotron_dist.process_groups import Groups


class _NotedGroups(Groups):
    """Groups of several ranks, in the order in which they are asked for."""

    def __init__(self, noted: list[tuple[int, ...]]) -> None:
        super().__init__(FAKE, torch.device("meta"), CallsInFlight(), None, batch_threads=False)
        self.noted = noted

    def new(self, ranks: tuple[int, ...], *, touched: bool = True) -> dist.ProcessGroup:
        """Note them, and return a group that nothing may use."""
        if len(ranks) > 1:
            self.noted.append(ranks)
        return dist.ProcessGroup(0, 1)  # pyrefly: ignore[bad-argument-type, missing-argument]


def counted_mesh(config: MeshConfig, rank: int) -> tuple[Mesh, list[tuple[int, ...]]]:
    """Return a rank's mesh for planners, and the global ranks of each group that it has.

    What the mesh is asked for later is added to the list, as ``Mesh.connect`` and the mesh that it
    returns make groups. Nothing can be sent.

    Args:
        config: sizes of the axes.
        rank: global number of the rank.
    """
    noted: list[tuple[int, ...]] = []
    mesh = Mesh(config, rank, torch.device("meta"), FAKE)
    mesh._groups = _NotedGroups(noted)
    mesh._open()
    return mesh, noted
