"""Record every communication of this rank with its shape, dtype, line and bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from kenotron_dist.axis import Axis
from kenotron_dist.diagnosis.collective_checker import CollectiveChecker
from kenotron_dist.diagnosis.listening import Listening
from kenotron_dist.in_flight import CallsInFlight, Entry
from kenotron_dist.mesh import Mesh


class Recorder(Listening):
    """Keeps an ``Entry`` of each communication that this rank starts. A context manager.

    It may be read from any thread. What it recorded stays readable when it is closed.

    Args:
        pulse: that of the axes.
        axis_sizes: number of ranks by axis.
        all_axes: how many axes have the whole world together.
    """

    def __init__(self, pulse: CallsInFlight, axis_sizes: Mapping[str, int], all_axes: int) -> None:
        self._axis_sizes, self._all_axes = axis_sizes, all_axes
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        super().__init__(pulse)

    @property
    def entries(self) -> list[Entry]:
        """Communications started since the beginning, or the last ``cut``, in order."""
        with self._lock:
            return list(self._entries)

    def bytes_per_axis(self, entries: Sequence[Entry] | None = None) -> dict[str, int]:
        """Bytes that left this rank, by axis, of these entries (default: ``entries``).

        ``message_size`` counts them. A ``twin`` counts as its axis, several axes together as
        those that have more than one rank, all of them as ``world``; parts of an axis have names of
        their own (``tp/2``, ``pp[0, 3]``).
        """
        found: dict[str, int] = {}
        for entry in self.entries if entries is None else entries:
            if entry.makes_group:
                continue
            name = self._name(entry.ticket.axis)
            found[name] = found.get(name, 0) + entry.sent
        return found

    def _name(self, axis: str) -> str:
        names = axis.rstrip("'").removesuffix("/1").split("_")
        if len(names) == self._all_axes:
            return "world"
        return "_".join(name for name in names if self._axis_sizes.get(name, 2) > 1)

    def cut(self) -> list[Entry]:
        """The entries so far, which are forgotten here: a step ends."""
        with self._lock:
            entries, self._entries = self._entries, []
        return entries

    def heard(self, entry: Entry) -> None:
        """Keep it."""
        with self._lock:
            self._entries.append(entry)


def record(mesh: Mesh) -> Recorder:
    """Record what this rank communicates over the axes of ``mesh``, until it is closed:

        with record(mesh) as recorder:
            step()
        print(recorder.bytes_per_axis(), *recorder.entries)

    Not collective. Nothing is recorded on an axis of one rank, where nothing is communicated.
    """
    return Recorder(mesh.pulse, mesh.axis_sizes, len(mesh.sizes))


def shape_axes(sizes: Mapping[str, int], backend: str = "nccl") -> tuple[dict[str, Axis], Recorder]:
    """Return axes without processes, and what records their communication, until it is closed.

    This process is their first rank. Collectives of tensors on device meta give shapes, and their
    bytes are recorded as if they were sent:

        axes, recorder = shape_axes({"tp": 8})
        with recorder:
            all_reduce(torch.empty(4, 4, device="meta"), axes["tp"])
        print(recorder.bytes_per_axis())  # {'tp': 112}

    Args:
        sizes: number of ranks by axis.
        backend: whose algorithms are counted, ``nccl`` or ``gloo``.
    """
    pulse = CallsInFlight()
    axes = {
        name: Axis(name, 0, tuple(range(size)), backend=backend, pulse=pulse)
        for name, size in sizes.items()
    }
    return axes, Recorder(pulse, sizes, 0)


def compare_collectives(mesh: Mesh) -> Listening:
    """Compare what ranks communicate over ``mesh`` before they do, until it is closed. Slow.

    ``KENOTRON_DEBUG=collectives`` does it for every mesh. Call it on all ranks. A rank that calls
    another operation than its peers, or the same with another shape, dtype or size, starts nothing:
    it gets ``Diverged``, which names both lines.

    Raises RuntimeError on a mesh of several ranks without a process group.
    """
    store = dist.distributed_c10d._get_default_store() if mesh.world.size > 1 else dist.HashStore()
    return CollectiveChecker(mesh.pulse, mesh.rank, store)
