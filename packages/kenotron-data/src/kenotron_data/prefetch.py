"""Work a few items ahead in a thread, without changing what comes out."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetched(Generic[Item]):
    """Iterate over `source` in a thread that keeps at most `depth` items waiting.

    The items come in order and unchanged. An error of the source is raised by the `next()` that
    would have returned the item. The thread ends with the source, by `close()`, when the object is
    collected and at the end of the program.

    Args:
        source: the iterator; from now on only the thread touches it.
        depth: items that may wait, at least 1.

    Raises:
        ValueError: `depth` is not positive.
    """

    def __init__(self, source: Iterator[Item], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"the depth of prefetching must be at least 1, but {depth} was given")
        self._queue: queue.Queue[Item | _Ended] = queue.Queue(maxsize=depth)
        stop = threading.Event()
        # The thread must not hold this object, or it would never be collected.
        thread = threading.Thread(
            target=_fill, args=(source, self._queue, stop), name="kenotron-data", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _end, thread, self._queue, stop)

    def __iter__(self) -> Iterator[Item]:
        """Return itself."""
        return self

    def __next__(self) -> Item:
        """Return the next item, wait for it if need be; raises the error of the source."""
        if not self.close.alive:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _Ended):
            self.close()
            raise item.error
        return item


class _Ended:
    """The last word of the thread: the source's error, or StopIteration."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _fill(
    source: Iterator[Item], items: "queue.Queue[Item | _Ended]", stop: threading.Event
) -> None:
    """Run in the thread: hand over items until the source or the consumer ends."""
    try:
        while not stop.is_set():
            items.put(next(source))
    except BaseException as error:
        items.put(_Ended(error))


def _end(
    thread: threading.Thread, items: "queue.Queue[Item | _Ended]", stop: threading.Event
) -> None:
    """Stop the thread and wait for it, unless the thread itself collected the object.

    Once the queue is empty the thread can place the item it holds, and sees that it shall stop.
    """
    stop.set()
    while not items.empty():
        items.get_nowait()
    if thread is not threading.current_thread():
        thread.join()
