"""Make items ahead in several threads or processes, and hand them over in order."""

import multiprocessing
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, Literal, TypeVar

Task = TypeVar("Task")
Item = TypeVar("Item")
WorkerKind = Literal["thread", "process"]
"""Kind of workers. Threads share memory; processes help where samples are made in Python."""

_IN_WORKER: dict[str, Callable[[Any], Any]] = {}
"""The work of this process, where it is a worker."""


class WorkedAhead(Generic[Task, Item]):
    """Iterate over `work(task)` for each task, in order, made by several workers.

    At most `depth` items are in the making or waiting. An error of the work is raised by the
    `next()` that would have returned the item. Workers end with the tasks, by `close()` and when
    the object is collected.

    Args:
        work: makes an item; with processes it, the tasks and the items must be picklable.
        tasks: read in the caller's thread.
        workers: threads or processes, at least 1.
        depth: items that may be ahead, at least 1.
        kind: processes are spawned: a program that uses them keeps its start under
            `if __name__ == "__main__"`.
        start: how processes are started: "spawn", or "forkserver", which imports once for all.

    Raises:
        ValueError: a number is not positive, or the kind is unknown.
    """

    def __init__(
        self,
        work: Callable[[Task], Item],
        tasks: Iterator[Task],
        *,
        workers: int,
        depth: int,
        kind: WorkerKind = "thread",
        start: Literal["spawn", "forkserver"] = "spawn",
    ) -> None:
        check_workers(workers, kind)
        if depth < 1:
            raise ValueError(f"the depth of prefetching must be at least 1, but {depth} was given")
        self._tasks, self._depth = tasks, depth
        self._futures: deque[Future[Item]] = deque()
        if kind == "thread":
            pool: Executor = ThreadPoolExecutor(workers, thread_name_prefix="kenotron-data")
            self._submit: Callable[[Task], Future[Item]] = _Submit(pool, work)
        else:
            pool = ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context(start),
                initializer=_start_worker,
                initargs=(work,),
            )
            self._submit = _Submit(pool, _in_worker)
        # Not a method of this object, or it would never be collected.
        self.close = weakref.finalize(self, _end, pool, self._futures)

    def __iter__(self) -> Iterator[Item]:
        """Return itself."""
        return self

    def __next__(self) -> Item:
        """Return the next item, wait for it if need be; raises the error of the work."""
        if not self.close.alive:
            raise StopIteration
        while len(self._futures) < self._depth:
            try:
                self._futures.append(self._submit(next(self._tasks)))
            except StopIteration:
                break
        if not self._futures:
            self.close()
            raise StopIteration
        try:
            return self._futures.popleft().result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that prepares batches ended without an answer: it was killed (out of "
                "memory?), or its program does not keep its start under if __name__ == '__main__'"
            ) from error


class _Submit(Generic[Task, Item]):
    """Give one task to a pool."""

    def __init__(self, pool: Executor, work: Callable[[Task], Item]) -> None:
        self.pool, self.work = pool, work

    def __call__(self, task: Task) -> "Future[Item]":
        return self.pool.submit(self.work, task)


def check_workers(workers: int, kind: str) -> None:
    """Refuse a number of workers below 1 and an unknown kind with a ValueError."""
    if workers < 1:
        raise ValueError(f"the number of workers must be at least 1, but {workers} was given")
    if kind not in ("thread", "process"):
        raise ValueError(f"worker_kind must be 'thread' or 'process', but {kind!r} was given")


def _start_worker(work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the program ends its pool
    _IN_WORKER["work"] = work


def _in_worker(task: Any) -> Any:
    return _IN_WORKER["work"](task)


def _end(pool: Executor, futures: "deque[Future[Any]]") -> None:
    """Cancel what has not begun and wait for what runs."""
    futures.clear()
    pool.shutdown(wait=True, cancel_futures=True)
