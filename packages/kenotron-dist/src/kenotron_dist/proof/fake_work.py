"""Operations of the fake NCCL: they run later, on the thread of their communicator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_DELAY = 0.0005
"""Seconds that an operation waits on its queue."""
_LAG = 0.05
"""Seconds between the end of an operation and the moment when ``is_completed`` returns true."""


class Group(Protocol):
    """Part of a process group that an operation needs."""

    timeout: timedelta
    aborted: threading.Event


class FakeMark:
    """A place in the queue of the imitated device, which the device reaches some time later."""

    def __init__(self) -> None:
        self._reached = time.monotonic() + _LAG

    def is_completed(self) -> bool:
        """Return whether the device has come so far."""
        return time.monotonic() >= self._reached


class FakeWork(dist.Work):
    """One operation on its queue."""

    def __init__(self, group: Group, run: Callable[[], None], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._group, self._run = group, run
        self.outputs = list(outputs)
        """Kept alive as long as this object, as a Work of NCCL does."""
        self._done = threading.Event()
        self._ended, self._error = float("inf"), ""

    def execute(self) -> None:
        """Run it; called by the thread of the communicator."""
        time.sleep(_DELAY)
        try:
            with torch.inference_mode():  # there tensors of either kind may be written
                self._run()
        except RuntimeError as error:
            self._error = str(error)
        self._ended = time.monotonic()
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has run, or the group was aborted: outputs then mean nothing.

        Raises RuntimeError when it failed, or did not run within the timeout of the group.
        """
        end = time.monotonic() + self._group.timeout.total_seconds()
        while not self._done.wait(0.01):
            if self._group.aborted.is_set():
                return True
            if time.monotonic() > end:
                raise RuntimeError(f"fake_nccl: no end within {self._group.timeout}")
        if self._error and not self._group.aborted.is_set():
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        """Return whether it ended some time ago."""
        return self._done.is_set() and time.monotonic() >= self._ended + _LAG


def execute(queue: SimpleQueue[FakeWork | None]) -> None:
    """Body of the thread of a communicator."""
    while (work := queue.get()) is not None:
        work.execute()
        del work  # keep no reference while waiting for the next one
