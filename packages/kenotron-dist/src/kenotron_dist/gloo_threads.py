"""gloo's threads wait for their turn instead of pushing those that compute off their cores.

gloo serves the connections of each group from a thread of its own. Where threads are more than
cores the scheduler lets it in when data arrive, often in place of the very thread that holds the
connection's lock; it then asks for the lock without pause until its time is up (pytorch/gloo issue
246). That was a third of the processor time of small ranks, and most of the time of a small sum.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = b"gloo_tcp_loop"


def gloo_threads() -> list[int]:
    """Return the ids of gloo's threads in this process.

    None are found where there is no Linux, or with torch 2.11, whose gloo gives them no name.
    """
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # threads come and go
            if (task / "comm").read_bytes().strip() == _NAME:  # others' may be no text
                found.append(int(task.name))
    return found


def let_gloo_threads_wait() -> None:
    """Make this process's gloo threads batch threads (sched(7)): no wake-up takes another's core.

    Their share of the cores stays what it was: with a lower priority, or as idle threads, they
    starve next to other programs. No-op where the system has no such policy or forbids it, for
    threads whose policy was set before, and for those that ``gloo_threads`` cannot find.
    """
    for thread in gloo_threads():
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
