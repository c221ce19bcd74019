"""Work that leaves Python's lock alone, on threads that never keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def set_device(device: torch.device) -> Callable[[], None]:
    """Return what a new thread calls before it touches ``device``; on a CPU it does nothing.

    The current device of a new thread is 0, whatever that of its parent: its first call would
    create a context on device 0, about 0.5 GB, for every rank of the host. A device without index
    is the current one of the thread that calls this.
    """
    if device.type in ("cpu", "meta"):
        return lambda: None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return lambda: torch.accelerator.set_device_index(index)


def together(
    work: Callable[[], None], threads: int, begin: Callable[[], None] = lambda: None
) -> None:
    """Run ``work`` in this thread and in further ones, until all are done; 0: not at all.

    The other threads call ``begin`` first.
    """
    if threads == 0:
        return

    def run() -> None:
        begin()
        work()

    others = [threading.Thread(target=run, daemon=True) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()


def in_parallel(run: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call ``run`` with every item, on ``threads`` threads, this one and daemons; items
    are begun in order.

    Raises the first error, after which no further item is begun, once all threads are idle.
    """
    left, errors, lock = iter(list(items)), [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item = next(left, None) if not errors else None
            if item is None:
                return
            try:
                run(item)
            except Exception as error:
                errors.append(error)

    together(work, threads)
    if errors:
        raise errors[0]
