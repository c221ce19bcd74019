"""Making process groups: their ranks wait for one another, so it is recorded as communication."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from kenotron_dist.gloo_threads import let_gloo_threads_wait
from kenotron_dist.in_flight import Entry, Pulse


def make_group(
    ranks: tuple[int, ...],
    pulse: Pulse,
    timeout: timedelta | None,
    touched: tuple[str, torch.device] | None = None,
    *,
    batch_threads: bool = False,
) -> dist.ProcessGroup:
    """Make a process group. Collective over its ranks.

    Args:
        ranks: global ranks, of which this is one.
        pulse: records it, as a communication without data.
        timeout: that of the group's operations; None: the default group's.
        touched: backend and device, to make the communicator at once, too (``touch``).
        batch_threads: make gloo's threads batch threads afterwards (``let_gloo_threads_wait``).

    Raises:
        Diverged: ranks are compared, and not all of these make the group.
        RuntimeError: the backend gave up; names operation and line.
    """
    made: list[dist.ProcessGroup] = []

    def make() -> None:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this rank is among them
        if touched is not None:
            touch(group, *touched)
        made.append(group)

    channel = f"group:{','.join(map(str, ranks))}"
    ticket = pulse.issue(channel, "group", ranks, "new_group")
    pulse.wait(ticket, pulse.announced(Entry(ticket, "", "", (), 0, whole=True), make))
    if batch_threads:
        let_gloo_threads_wait()
    return made[0]


def touch(group: dist.ProcessGroup, backend: str, device: torch.device) -> None:
    """Let the backend make the communicator of a group now. Collective over it.

    NCCL makes it in the group's first collective, and the process waits there for all its ranks:
    in the middle of a step two groups could wait for one another. gloo has none.
    """
    if backend != "gloo":
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
