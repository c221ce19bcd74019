"""Work that waits for the network, on a few threads that never keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_parallel(run: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call ``run`` with every item, on ``threads`` daemon threads; items are begun in order.

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

    crew = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if errors:
        raise errors[0]
