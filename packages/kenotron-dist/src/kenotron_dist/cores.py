"""Number of cores that this process may compute on."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = Path("/sys")


def usable_cores(system: Path = _SYSTEM) -> int:
    """Cores that the process may use: of its affinity, within its control group's quota.

    Two hardware threads of one core count once: products gain nothing from the second. Without
    Linux's files it is the number of processors. ``system`` is where those files are.
    """
    numbers = _affinity()
    cores = {_siblings(system, number) for number in numbers}
    return max(1, min(len(cores), _quota(system)))


def _affinity() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(system: Path, number: int) -> str:
    """The hardware threads of a processor's core, the same text for each of them."""
    file = system / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list"
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return str(number)


def _quota(system: Path) -> int:
    """Processors whose time the control group may take, rounded up; very many without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (system / "fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            return math.ceil(int(quota) / int(period))
    return 1 << 30
