"""Process groups of a mesh: making one is recorded, for its ranks wait for one another."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from kenotron_dist.fake_world import FAKE, leave_fake_world
from kenotron_dist.gloo_threads import let_gloo_threads_wait
from kenotron_dist.in_flight import CallsInFlight, Entry


class Groups:
    """The groups of one mesh, by their global ranks.

    Args:
        backend: of the world.
        device: of this rank's tensors.
        pulse: records how groups are made.
        timeout: that of their operations; None: the world's.
        batch_threads: see ``make_group``.
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        pulse: CallsInFlight,
        timeout: timedelta | None,
        batch_threads: bool,
    ) -> None:
        self.known: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """The one that all axes over the same ranks share."""
        self.batch_threads = batch_threads
        self._backend, self._device, self._pulse, self._timeout = backend, device, pulse, timeout
        self._made: list[dist.ProcessGroup] = []

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of these ranks, made where there is none yet; None for one rank."""
        if len(ranks) <= 1:
            return None
        if ranks not in self.known:
            self.known[ranks] = self.new(ranks)
        return self.known[ranks]

    def new(self, ranks: tuple[int, ...], *, touched: bool = True) -> dist.ProcessGroup:
        """Make a further group of these ranks, and its communicator unless not ``touched``."""
        place = (self._backend, self._device) if touched else None
        batch = self.batch_threads
        made = make_group(ranks, self._pulse, self._timeout, place, batch_threads=batch)
        self.adopt(made)
        return made

    def adopt(self, group: dist.ProcessGroup) -> None:
        """Destroy a group with those that were made here."""
        self._made.append(group)

    def close(self) -> None:
        """Destroy what was made here; with the fake backend also the world."""
        if self._backend == FAKE:
            leave_fake_world()
        else:
            for group in reversed(self._made):
                destroy_group(group)
        self._made.clear()
        self.known.clear()


def make_group(
    ranks: tuple[int, ...],
    pulse: CallsInFlight,
    timeout: timedelta | None,
    touched: tuple[str, torch.device] | None = None,
    *,
    batch_threads: bool = False,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a process group. Collective over its ranks.

    Args:
        ranks: global ranks, of which this is one.
        pulse: records it, as a communication without data.
        timeout: that of the group's operations; None: the default group's.
        touched: backend and device, to make the communicator at once, too (``touch``).
        batch_threads: make gloo's threads batch threads afterwards (``let_gloo_threads_wait``).
        backend: of the group; None: the default group's.

    Raises:
        RuntimeError: the backend gave up; names operation and line.
    """
    made: list[dist.ProcessGroup] = []

    def make() -> None:
        options = {"timeout": timeout, "backend": backend, "use_local_synchronization": True}
        group = dist.new_group(list(ranks), **options)
        assert isinstance(group, dist.ProcessGroup)  # this rank is among them
        if touched is not None:
            touch(group, *touched)
        made.append(group)

    channel = f"group:{','.join(map(str, ranks))}"
    ticket = pulse.issue(channel, "group", ranks, "new_group")
    pulse.announce(Entry(ticket, "", "", (), 0, makes_group=True))
    pulse.wait(ticket, make)
    if batch_threads:
        let_gloo_threads_wait()
    return made[0]


class _Destroyed:
    """Takes the place of a group in torch's table of names."""

    def shutdown(self) -> None:
        """Do nothing: it was done."""


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a process group; its name stays taken.

    torch names a group by its ranks and by how many this process has: a later one would get the
    same name, and find the old addresses of its peers in the store.
    """
    names = dist.distributed_c10d._world.pg_names
    name = names[group]
    dist.destroy_process_group(group)
    names[_Destroyed()] = name  # pyrefly: ignore[unsupported-operation]


def touch(group: dist.ProcessGroup, backend: str, device: torch.device) -> None:
    """Let the backend make the communicator of a group now. Collective over it.

    NCCL makes it in the group's first collective, and the process waits there for all its ranks:
    in the middle of a step two groups could wait for one another. gloo has none.
    """
    if backend not in ("gloo", FAKE):
        work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
        assert work is not None  # this rank is in the group
        work.wait()


def refuse_bound_device(world: dist.ProcessGroup) -> None:
    """Raise ValueError for a default group that was made with a device.

    torch then splits NCCL's communicator for each new group, which all ranks must call together,
    also those outside: a mesh, where a rank makes only its own groups, would hang.
    """
    if world.bound_device_id is not None:
        raise ValueError(
            f"the default process group is bound to {world.bound_device_id}: a mesh makes groups "
            "of some ranks, which torch then splits off with all ranks, and hangs; call "
            "init_process_group without device_id, or kenotron_dist.from_env"
        )
