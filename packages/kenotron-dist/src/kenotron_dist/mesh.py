"""The grid of ranks and the process groups along its axes.

Only ``Mesh.connect`` and the methods that say so create groups; ``grid`` has the arithmetic.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kenotron_dist.comparer import Comparer
from kenotron_dist.gloo_threads import let_gloo_threads_wait
from kenotron_dist.grid import AXES, MeshConfig, coords_of, line_through
from kenotron_dist.groups import make_group
from kenotron_dist.launch import debugging
from kenotron_dist.pulse import Pulse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Axis:
    """A line of ranks as one of its members sees it. Equal only to itself; copies as itself."""

    name: str
    """``tp``, or ``dp_cp`` for a combined view."""
    rank: int
    """Index of this process along the axis."""
    ranks: tuple[int, ...]
    """Global ranks along the axis, in axis order."""
    group: dist.ProcessGroup | None = None
    """None when the axis has one rank: nothing is ever communicated."""
    backend: str = "gloo"
    """``gloo`` or ``nccl``: decides how sums are computed."""
    pulse: Pulse | None = None
    """Where communications are noted for the watchdog."""

    @cached_property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)

    @cached_property
    def tag(self) -> int:
        """First tag of this line's exchanges: axes over the same ranks do not mix theirs up."""
        return (1 + zlib.crc32(self.channel.encode()) % 60) << 24

    @cached_property
    def channel(self) -> str:
        """A short text that is the same on all ranks of this line and differs between lines."""
        ranks = ",".join(map(str, self.ranks))
        if len(self.ranks) > 16:
            ranks = f"{self.ranks[0]}..{self.ranks[-1]}/{zlib.crc32(ranks.encode()):08x}"
        return f"{self.name}:{ranks}"

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Ranks within the group, in axis order: what the group's own methods take."""
        group = self.group
        return tuple(0 if group is None else dist.get_group_rank(group, r) for r in self.ranks)

    @classmethod
    def solo(cls, name: str, rank: int = 0) -> Axis:
        """An axis of one rank, which needs no process group."""
        return cls(name, 0, (rank,))

    def __copy__(self) -> Axis:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a process group cannot be copied, and a layer's copy talks to the same peers

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(
                f"axis {self.name} of {self.size} ranks cannot be pickled, it holds a process "
                "group: save a module's state_dict() instead of the module"
            )
        return dict(self.__dict__)


class Mesh:
    """A grid of ``pp * dp * cp * tp`` ranks; ``mesh["tp"]`` is this rank's line along tp.

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
    ) -> None:
        self.config = config
        self.sizes = config.sizes
        self.rank = rank
        self.coords = coords_of(self.sizes, rank)
        self.device = device
        self.backend = backend
        self.pulse = Pulse()
        self._timeout = timeout
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @classmethod
    def connect(
        cls,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
    ) -> Mesh:
        """Create this rank's process groups. Collective over the world.

        Arguments: ranks along each axis; the device that holds this rank's tensors (default: the
        current accelerator under nccl, else cpu); the timeout of the groups' operations (default:
        that of the world). A mesh of one rank needs no initialised process group. With
        ``KENOTRON_DEBUG=collectives`` its ranks are compared (``compare_collectives``).

        Raises ValueError when an axis is not positive, when the product is not the world size, or
        for a ``KENOTRON_DEBUG`` that asks for something else.
        """
        config = MeshConfig(pp=pp, dp=dp, cp=cp, tp=tp)
        live = dist.is_available() and dist.is_initialized()
        compared = bool(debugging())
        _check_sizes(config, dist.get_world_size() if live else 1)
        backend = str(dist.get_backend()) if live else "gloo"
        place = torch.device(device) if device is not None else _default_device(backend)
        mesh = cls(config, dist.get_rank() if live else 0, place, backend, timeout)
        if live and config.world_size > 1:
            world = dist.group.WORLD
            assert world is not None  # live says that it exists
            mesh._groups[tuple(range(config.world_size))] = world
            let_gloo_threads_wait()
        for names in [*((name,) for name in AXES), ("dp", "cp"), ("dp", "cp", "tp"), AXES]:
            mesh._view(names)
        if live and config.world_size > 1 and compared:
            Comparer(mesh.pulse, mesh.rank, dist.distributed_c10d._get_default_store())
        return mesh

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """One axis, or several as one: ``mesh["dp", "cp"]``.

        ``connect`` makes every axis, dp-cp, dp-cp-tp and the world. Collective over the world when
        another view is asked for the first time. Raises KeyError for an unknown axis.
        """
        wanted = (names,) if isinstance(names, str) else names
        unknown = [name for name in wanted if name not in self.sizes]
        if unknown:
            raise KeyError(f"no axis {unknown[0]} in this mesh; it has {', '.join(self.sizes)}")
        if not wanted:
            raise KeyError(f"name an axis of this mesh: {', '.join(self.sizes)}")
        return self._view(tuple(name for name in AXES if name in wanted))

    @property
    def world(self) -> Axis:
        """All ranks of the mesh as one axis."""
        return self[AXES]

    def subaxis(self, name: str, parts: int) -> Axis:
        """The ranks along ``name`` that hold the same one of ``parts`` parts.

        With tp = 8 and 2 kv heads, ``subaxis("tp", 2)`` is the four ranks that share a kv head.
        Collective over the world when first asked. Raises ValueError unless ``parts`` divides the
        axis.
        """
        size = self.sizes[name]
        if parts < 1 or size % parts:
            raise ValueError(
                f"cannot form {parts} groups of equal size from {size} {name} ranks: "
                f"choose a number that divides {size}"
            )
        step = size // parts
        part = self.coords[name] // step
        return self._cell(f"{name}/{parts}", name, tuple(range(part * step, (part + 1) * step)))

    def subset(self, name: str, members: Sequence[int]) -> Axis | None:
        """The given coordinates along ``name`` as an axis; None on a rank that is not among them.

        Collective over the world when first asked. Raises ValueError for a coordinate outside the
        axis.
        """
        chosen = tuple(sorted(set(members)))
        size = self.sizes[name]
        if not chosen or chosen[0] < 0 or chosen[-1] >= size:
            raise ValueError(f"{name} coordinates {list(members)} are not all within 0..{size - 1}")
        mine = self.coords[name] in chosen
        rest = tuple(i for i in range(size) if i not in chosen)
        axis = self._cell(f"{name}{list(chosen)}", name, chosen if mine else rest)
        return axis if mine else None

    def twin(self, name: str) -> Axis:
        """The axis ``name`` once more, with a process group of its own.

        For two streams of transfers that must not wait for one another: between two ranks NCCL
        runs all transfers of a group in one order. Collective over the world when first asked.
        """
        key = f"{name}'"
        if (key,) not in self._axes:
            axis = self._view((name,))
            group = self._new_group(axis.ranks) if axis.size > 1 else None
            self._axes[(key,)] = self._axis(key, axis.ranks, group)
        return self._axes[(key,)]

    def device_mesh(self) -> DeviceMesh:
        """The same grid as a ``torch.distributed.DeviceMesh`` over the same groups' ranks.

        Collective over the world. Raises RuntimeError without an initialised process group.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise RuntimeError("device_mesh() needs a process group: start with spawn or from_env")
        made = init_device_mesh(
            self.device.type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes)
        )
        let_gloo_threads_wait()
        return made

    def _view(self, names: tuple[str, ...]) -> Axis:
        if names not in self._axes:
            ranks = line_through(self.sizes, names, self.rank)
            self._axes[names] = self._axis("_".join(names), ranks, self._group(ranks))
        return self._axes[names]

    def _cell(self, key: str, name: str, members: tuple[int, ...]) -> Axis:
        """An axis over ``members`` of a line; every rank makes exactly one group, of its cell.

        torch names a group by its ranks and by how many this process has made, so the numbers
        must stay equal on all ranks: ranks left out of a subset form a group of their own.
        """
        if (key,) not in self._axes:
            line = self._view((name,)).ranks
            ranks = tuple(line[i] for i in members)
            whole = len(members) in (self.sizes[name], 0) or self.config.world_size == 1
            group = self._group(ranks) if whole else self._new_group(ranks)
            self._axes[(key,)] = self._axis(key, ranks, group if len(ranks) > 1 else None)
        return self._axes[(key,)]

    def _axis(self, name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis:
        rank = ranks.index(self.rank) if self.rank in ranks else 0
        return Axis(name, rank, ranks, group, self.backend, self.pulse)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) <= 1:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = self._new_group(ranks)
        return self._groups[ranks]

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return make_group(ranks, self.pulse, self._timeout)

    def __repr__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"Mesh({sizes}, rank={self.rank}, device={self.device})"


def _check_sizes(config: MeshConfig, world: int) -> None:
    for name, size in config.sizes.items():
        if size < 1:
            raise ValueError(f"{name} = {size}: an axis has at least one rank")
    if config.world_size != world:
        product = " * ".join(f"{name}={size}" for name, size in config.sizes.items())
        raise ValueError(
            f"{product} = {config.world_size}, but the world has {world} "
            f"rank{'s' if world > 1 else ''}: change the sizes or start {config.world_size} "
            "processes"
        )


def _default_device(backend: str) -> torch.device:
    if backend == "nccl":
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None  # nccl exists only with one
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
