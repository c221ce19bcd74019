"""The grid of ranks and the process groups along its axes; ``grid`` has the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from kenotron_dist.axis import Axis
from kenotron_dist.device import default_device, indexed
from kenotron_dist.fake_world import FAKE, join_fake_world
from kenotron_dist.gloo_threads import let_gloo_threads_wait
from kenotron_dist.grid import (
    AXES,
    EXPERT_AXES,
    MeshConfig,
    blocks_of,
    check_sizes,
    coords_of,
    grid_of,
    line_through,
    ring_phases,
)
from kenotron_dist.grid_view import GridView, views_of
from kenotron_dist.in_flight import CallsInFlight
from kenotron_dist.launch import COLLECTIVES, debugging
from kenotron_dist.placement import TensorLayout
from kenotron_dist.process_groups import Groups, refuse_bound_device, touch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """A grid of ``pp * dp * cp * tp`` ranks; ``mesh["tp"]`` is this rank's line along tp.

    Over the ranks of each stage there is a second grid, edp x ep x etp, for experts.

    Groups are made once, in one global order, each rank creating only its own: the cost does not
    grow with the world. Views with equal rank sets share one group.
    """

    def __init__(
        self,
        config: MeshConfig,
        rank: int,
        device: torch.device,
        backend: str = "gloo",
        timeout: timedelta | None = None,
        *,
        batch_threads: bool = False,
    ) -> None:
        self.config = config
        self.sizes = config.sizes
        """Ranks along the axes of the dense grid, whose product is the world."""
        self.axis_sizes = config.axis_sizes
        """Ranks along the axes of both grids."""
        self.rank = rank
        self.coords = coords_of(self.sizes, rank)
        self._axis_coords = self.coords | coords_of(config.expert_sizes, rank)
        self._view_of = views_of(config, rank)
        self.device = indexed(device)
        self.backend = backend
        self.pulse = CallsInFlight()
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._pairs: dict[str, dict[tuple[int, int], Axis]] = {}
        self._groups = Groups(backend, self.device, self.pulse, timeout, batch_threads)

    @classmethod
    def connect(
        cls,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        *,
        ep: int = 1,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
        batch_threads: bool = False,
        backend: Literal["fake"] | None = None,
        rank: int = 0,
    ) -> Mesh:
        """Create this rank's process groups. Collective over the world.

        Args:
            pp, dp, cp, tp: ranks along each axis.
            ep: parts of the experts over the ranks of a stage, a divisor of dp * cp * tp.
            device: of this rank's tensors (default: the current accelerator under nccl, else cpu).
            timeout: of the groups' operations (default: that of the world).
            batch_threads: make gloo's threads batch threads (``let_gloo_threads_wait``).
            backend, rank: "fake": be ``rank`` of a world without others; tensors are on meta.

        A mesh of one rank, or a fake one, needs no process group. ``KENOTRON_DEBUG=collectives``
        compares ranks (``compare_collectives``). All communicators are made here.

        Raises ValueError for sizes that do not make the world, a group bound to a device, a fake
        rank in a world that there is, or a ``KENOTRON_DEBUG`` that asks for something else.
        """
        config = MeshConfig(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
        if backend == FAKE:
            join_fake_world(rank, config.world_size, device)
        live = dist.is_available() and dist.is_initialized()
        compared = COLLECTIVES in debugging()
        check_sizes(config, dist.get_world_size() if live else 1)
        known = str(dist.get_backend()) if live else "gloo"
        place = torch.device(device) if device is not None else default_device(known)
        rank = dist.get_rank() if live else 0
        mesh = cls(config, rank, place, known, timeout, batch_threads=batch_threads)
        if live and config.world_size > 1:
            world = dist.group.WORLD
            assert world is not None  # live says that it exists
            refuse_bound_device(world)
            mesh._groups.known[tuple(range(config.world_size))] = world
            if batch_threads:
                let_gloo_threads_wait()
            touch(world, known, mesh.device)
        mesh._open()
        if live and config.world_size > 1 and compared:
            from kenotron_dist.diagnosis.collective_checker import CollectiveChecker

            CollectiveChecker(mesh.pulse, mesh.rank, dist.distributed_c10d._get_default_store())
        return mesh

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Mesh:
        """Create a mesh of this process and a device alone, in a world of any size."""
        return cls(MeshConfig(), 0, torch.device(device), "gloo")

    @property
    def is_fake(self) -> bool:
        """True where there are no other ranks (``connect(backend="fake")``)."""
        return self.backend == FAKE

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """One axis, or several as one: ``mesh["dp", "cp"]``.

        ``connect`` makes every axis, dp-cp, dp-cp-tp and the world. Collective over the world when
        another view is asked for the first time. Raises KeyError for an unknown axis, ValueError
        for axes of both grids together.
        """
        wanted = (names,) if isinstance(names, str) else names
        known = ", ".join(self.axis_sizes)
        if unknown := [name for name in wanted if name not in self.axis_sizes]:
            raise KeyError(f"no axis {unknown[0]} in this mesh; it has {known}")
        if not wanted:
            raise KeyError(f"name an axis of this mesh: {known}")
        order = EXPERT_AXES if grid_of(wanted, f"mesh{list(wanted)}") == "expert" else AXES
        return self._view(tuple(name for name in order if name in wanted))

    @property
    def world(self) -> Axis:
        """All ranks of the mesh as one axis."""
        return self[AXES]

    def view(self, layout: TensorLayout) -> GridView:
        """Return this rank's view of the grid that a tensor lives in, which its placements name.

        Raises ValueError when they name axes of both grids.
        """
        return self._view_of(layout)

    def subaxis(self, name: str, parts: int) -> Axis:
        """The ranks along ``name`` that hold the same one of ``parts`` parts.

        With tp = 8 and 2 kv heads, ``subaxis("tp", 2)`` is the four ranks that share a kv head.
        Collective over the world when first asked. Raises ValueError unless it divides the axis.
        """
        size = self.axis_sizes[name]
        if parts < 1 or size % parts:
            raise ValueError(
                f"cannot form {parts} groups of equal size from {size} {name} ranks: "
                f"choose a number that divides {size}"
            )
        step = size // parts
        part = self._axis_coords[name] // step
        return self._cell(f"{name}/{parts}", (name,), tuple(range(part * step, (part + 1) * step)))

    def blocks(self, names: tuple[str, ...], size: int) -> tuple[Axis, Axis]:
        """Cut a view into blocks of ``size`` ranks: this one's, and those at its place in all.

        Collective over the world when first asked. Raises ValueError unless it divides the view.
        """
        line = self[names]
        own, across = blocks_of(line.rank, line.size, size, line.name)
        block = self._cell(f"{line.name}:{size}", names, own)
        return block, self._cell(f"{line.name}::{size}", names, across)

    def subset(self, name: str, members: Sequence[int]) -> Axis | None:
        """The given coordinates along ``name`` as an axis; None on a rank that is not among them.

        Collective over the world when first asked. Raises ValueError for one outside the axis.
        """
        chosen = tuple(sorted(set(members)))
        size = self.axis_sizes[name]
        if not chosen or chosen[0] < 0 or chosen[-1] >= size:
            raise ValueError(f"{name} coordinates {list(members)} are not all within 0..{size - 1}")
        mine = self._axis_coords[name] in chosen
        rest = tuple(i for i in range(size) if i not in chosen)
        axis = self._cell(f"{name}{list(chosen)}", (name,), chosen if mine else rest)
        return axis if mine else None

    def twin(self, name: str) -> Axis:
        """The axis ``name`` once more, with a process group of its own.

        For two streams of transfers that must not wait for one another: between two ranks NCCL
        runs all transfers of a group in one order. Collective over the world when first asked.
        """
        key = f"{name}'"
        if (key,) not in self._axes:
            ranks = self._view((name,)).ranks
            group = self._groups.new(ranks) if len(ranks) > 1 else None
            self._axes[(key,)] = self._axis(key, ranks, group)
        return self._axes[(key,)]

    def pairs(self, name: str) -> dict[tuple[int, int], Axis]:
        """Return a group of two ranks for each neighbour along ``name`` and each direction.

        Keys are (source, to), indices along the axis; the line is closed to a ring, and only pairs
        with this rank are there. The axis of a pair has the source first. For a pipeline (see
        ``twin``). Its first transfer makes the communicator. Collective when first asked.
        """
        if name not in self._pairs:
            self._pairs[name] = self._new_pairs(self._view((name,)))
        return self._pairs[name]

    def _new_pairs(self, line: Axis) -> dict[tuple[int, int], Axis]:
        """One group a rank and phase: torch's names of groups need equal counts on all ranks."""
        found: dict[tuple[int, int], Axis] = {}
        for edges in ring_phases(line.size):
            own = [edge for edge in edges if line.rank in edge]
            for source, to in [*own, *((b, a) for a, b in own)] or [(line.rank, line.rank)] * 2:
                ranks = tuple(dict.fromkeys((line.ranks[source], line.ranks[to])))
                group = self._groups.new(ranks, touched=False)
                if len(ranks) == 2:
                    found[source, to] = self._axis(line.name, ranks, group)
        return found

    def device_mesh(self) -> DeviceMesh:
        """The same grid as a ``torch.distributed.DeviceMesh`` over the same groups' ranks.

        Collective over the world. Raises RuntimeError without a process group.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise RuntimeError("device_mesh() needs a process group: start with spawn or from_env")
        made = init_device_mesh(
            self.device.type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes)
        )
        if self._groups.batch_threads:
            let_gloo_threads_wait()
        return made

    def close(self) -> None:
        """Destroy the groups, on every rank, with nothing under way; then make another mesh."""
        self.pulse.ended.set()
        self._groups.close()
        self._axes.clear()
        self._pairs.clear()

    def _open(self) -> None:
        """Make what ``connect`` promises, in the same order on all ranks."""
        expert = EXPERT_AXES[1:] if self.config.ep > 1 else ()  # else their lines are dense ones
        for names in [*AXES, ("dp", "cp"), ("dp", "cp", "tp"), AXES, *expert]:
            self._view((names,) if isinstance(names, str) else names)

    def _view(self, names: tuple[str, ...]) -> Axis:
        if names not in self._axes:
            expert = grid_of(names, "axes") == "expert"
            sizes = self.config.expert_sizes if expert else self.sizes
            ranks = line_through(sizes, names, self.rank)
            self._axes[names] = self._axis("_".join(names), ranks, self._groups.of(ranks))
        return self._axes[names]

    def _cell(self, key: str, names: tuple[str, ...], members: tuple[int, ...]) -> Axis:
        """An axis over ``members`` of a line; every rank makes exactly one group, of its cell.

        torch names a group by its ranks and by how many this process has made, so the numbers
        must stay equal on all ranks: ranks left out of a subset form a group of their own.
        """
        if (key,) not in self._axes:
            line = self[names]
            ranks = tuple(line.ranks[i] for i in members)
            whole = len(members) in (line.size, 0) or self.config.world_size == 1
            group = self._groups.of(ranks) if whole else self._groups.new(ranks)
            self._axes[(key,)] = self._axis(key, ranks, group if len(ranks) > 1 else None)
        return self._axes[(key,)]

    def _axis(self, name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis:
        rank = ranks.index(self.rank) if self.rank in ranks else 0
        return Axis(name, rank, ranks, group, self.backend, self.pulse)

    def __repr__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        sizes += f" ep={self.config.ep}" if self.config.ep > 1 else ""
        return f"Mesh({sizes}, rank={self.rank}, device={self.device})"
