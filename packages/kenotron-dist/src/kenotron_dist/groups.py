"""Making process groups: their ranks wait for one another, so all who explain a wait hear of it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from kenotron_dist.gloo_threads import let_gloo_threads_wait
from kenotron_dist.pulse import Entry, Pulse


def make_group(
    ranks: tuple[int, ...], pulse: Pulse, timeout: timedelta | None
) -> dist.ProcessGroup:
    """A group of these global ranks, of which this is one. Collective over them.

    ``pulse`` is told, as of a communication of no data; ``timeout`` is that of the group's
    operations (None: the default group's). Raises Diverged where ranks are compared and not all of
    them make it, RuntimeError with operation and line where the backend gives up.
    """
    made: list[dist.ProcessGroup] = []

    def make() -> None:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this rank is among them
        made.append(group)

    channel = f"group:{','.join(map(str, ranks))}"
    ticket = pulse.issue(channel, "group", ranks, "new_group")
    pulse.wait(ticket, pulse.told(Entry(ticket, "", "", (), 0, whole=True), make))
    let_gloo_threads_wait()
    return made[0]
