"""A mesh for work during the training, on a thread of its own."""

from __future__ import annotations

import torch

from kenotron_dist.axis import Axis
from kenotron_dist.grid import AXES
from kenotron_dist.mesh import Mesh
from kenotron_dist.process_groups import make_group


def background_mesh(mesh: Mesh) -> Mesh:
    """Return the same ranks as a mesh for another thread, over gloo and on the CPU.

    Its world has a process group of its own, so collectives of two threads never mix. Its waits are
    shown where ``mesh`` shows its own, so the watchdog finds a rank that hangs in one. Collective
    over the world. The thread asks for no axis but ``world``; ``close`` it before ``mesh``.
    """
    made, ranks, group = Mesh(mesh.config, mesh.rank, torch.device("cpu")), mesh.world.ranks, None
    if mesh.world.size > 1:
        batch = mesh._groups.batch_threads
        group = make_group(ranks, mesh.pulse, None, batch_threads=batch, backend="gloo")
        made._groups.adopt(group)
    made._axes[AXES] = Axis("background", mesh.rank, ranks, group, "gloo", mesh.pulse)
    return made
