"""Work that leaves Python's lock alone, on threads that never keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def together(work: Callable[[], None], threads: int) -> None:
    """Run ``work`` in this thread and in others beside it, until all are done; 0: not at all."""
    if threads == 0:
        return
    others = [threading.Thread(target=work, daemon=True) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()


def in_parallel(run: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call ``run`` with every item, on ``threads`` threads, this one and daemons beside it; items
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
