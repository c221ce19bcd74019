"""One line of ranks as its members see it: who takes part, over which group and backend."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from kenotron_dist.device import Mark, mark_queue
from kenotron_dist.in_flight import CallsInFlight


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
    """None when the axis has one rank: nothing is ever communicated. With more ranks and no group
    collectives of tensors on meta give shapes alone."""
    backend: str = "gloo"
    """``gloo`` or ``nccl``: decides how sums are computed."""
    pulse: CallsInFlight | None = None
    """Log in which communications are noted for the watchdog."""

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

    @cached_property
    def on_device(self) -> bool:
        """True where communications run on a device's queue (NCCL): waiting blocks no process.

        There two waits order the device, transfers of two ranks have no tags, and a communicator
        is made by its first operation.
        """
        return self.backend != "gloo"

    @property
    def counts_transfers(self) -> bool:
        """True where all ranks must do equally many sends and receives between two collectives.

        With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares at each collective how many
        operations of the group each rank has done; gloo counts every send and every receive.
        """
        return self.backend == "gloo" and dist.get_debug_level() == dist.DebugLevel.DETAIL

    @cached_property
    def control_device(self) -> torch.device:
        """Device on which the backend needs the tensors of a message that belongs to no device."""
        if self.backend != "nccl":
            return torch.device("cpu")
        return torch.device("cuda", torch.accelerator.current_device_index())

    def mark(self) -> Mark:
        """Mark the present end of the queue of this rank's device; ``on_device`` only."""
        return mark_queue(self.backend, self.control_device)

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
