"""Batches in an order that depends on the seed alone, for one data rank.

Global sample number g of a stage is place g % n of the permutation of epoch g // n, or what a
mixture says. A global batch is the next rows of that endless list; data ranks own consecutive
blocks of it, and micro-batches consecutive blocks of those.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kenotron_data.ahead import WorkedAhead, WorkerKind, check_workers
from kenotron_data.batch import Batch
from kenotron_data.cursor import Cursor
from kenotron_data.order import tasks
from kenotron_data.prefetch import Prefetched
from kenotron_data.row_samples import Dataset, Int64Array, Rows, read_rows, source_of
from kenotron_data.row_split import BatchRows, Microbatches, RowSplit, TargetMask

Task = tuple[Int64Array, Int64Array]


@dataclass(frozen=True, kw_only=True)
class _RowReader:
    """Reads the rows of a batch; all that a worker needs."""

    dataset: Dataset
    vocab_size: int | None

    def __call__(self, task: Task) -> tuple[Task, Rows]:
        return task, read_rows(self.dataset, task[1], self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class _BatchMaker:
    """Everything a batch follows from; threads hold this and not the loader."""

    reader: _RowReader
    split: RowSplit
    seed: int
    stage: int
    target_mask: TargetMask | None

    def tasks(self, consumed: int) -> Iterator[Task]:
        """Yield what to read for the batches that follow `consumed` samples."""
        return tasks(self.reader.dataset, self.split, self.seed, self.stage, consumed)

    def shape(self, read: tuple[Task, Rows]) -> Batch:
        """Make a batch of what a worker has read."""
        (samples_R, indices_R), rows = read
        sources_R = source_of(self.reader.dataset, indices_R)
        return self.split.assemble(rows, samples_R, sources_R, self.target_mask)

    def make(self, task: Task) -> Batch:
        """Read and shape one batch."""
        return self.shape(self.reader(task))


class Loader(Iterator[Batch]):
    """Iterate without end over this data rank's batches of a shuffled data set or of a mixture.

    For equal products dp_size * microbatches * micro_batch_size, or equal `batch`, the global
    batches are equal, row by row. Each epoch has its own order in which every sample comes once; an
    epoch may end inside a batch. A loader made with the cursor of another continues exactly where
    that one stood.

    Args:
        dataset: samples of one length. One with an order of its own (`Mixture`) is read in it.
        micro_batch_size: B, rows of a micro-batch.
        microbatches: M, micro-batches of a step on one rank; a function of the samples before it in
            this stage where batches grow, called from the threads that work ahead.
        dp_rank: this rank along the data axis.
        dp_size: ranks of the data axis.
        batch: rows of a global batch, a function likewise; None: as many as the ranks have room
            for. Of fewer the last places of the last ranks are padding, rows without targets.
        seed: the order's seed.
        cursor: where to begin. Its stage is part of the order's key.
        target_mask: function of (R,) int64 sample numbers (R = M * B) and S to (R, S) bool, False
            where a label becomes -100. It must depend on the sample numbers alone; it is called
            from the threads that work ahead.
        prefetch: batches prepared ahead; 0 prepares each in `next()`, whatever `workers` is.
        workers: threads or processes that prepare them; 0 prepares each in `next()`. No number
            changes what comes out.
        worker_kind: "thread", or "process" where making a sample is Python that holds the
            interpreter's lock. Processes are spawned and get the data set by pickle.
        vocab_size: refuse ids that are not below it, before they reach an embedding.

    Raises:
        ValueError: a size is not positive, the rank is out of range, the dataset is empty, or the
            cursor was not saved with a dataset of this size.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        microbatches: Microbatches,
        dp_rank: int = 0,
        dp_size: int = 1,
        batch: BatchRows = None,
        seed: int = 42,
        cursor: Cursor = Cursor(),
        target_mask: TargetMask | None = None,
        prefetch: int = 2,
        workers: int = 1,
        worker_kind: WorkerKind = "thread",
        vocab_size: int | None = None,
    ) -> None:
        check_dataset(dataset)
        _check_cursor(cursor, len(dataset))
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more batches, but {prefetch} was given")
        if workers:
            check_workers(workers, worker_kind)
        self._making = _BatchMaker(
            reader=_RowReader(dataset=dataset, vocab_size=vocab_size),
            split=RowSplit(
                micro_batch_size=micro_batch_size,
                microbatches=microbatches,
                dp_rank=dp_rank,
                dp_size=dp_size,
                batch=batch,
            ),
            seed=seed,
            stage=cursor.stage,
            target_mask=target_mask,
        )
        self._consumed = cursor.consumed
        self._prefetch, self._workers, self._kind = prefetch, workers, worker_kind
        self._ahead: Iterator[Batch] | None = None
        self._closed = False

    @property
    def cursor(self) -> Cursor:
        """Position of the user: batches prepared ahead do not count."""
        epoch = self._consumed // len(self._making.reader.dataset)
        return Cursor(self._making.stage, epoch, self._consumed)

    @property
    def global_batch(self) -> int:
        """Rows of the next global batch."""
        return self._making.split.at(self._consumed).global_batch

    def __next__(self) -> Batch:
        """Return the next batch and move the cursor by the global batch.

        Errors of the dataset and of the mask appear here and leave the cursor where it was; the
        next call tries the same batch again. ValueError after `close()`.
        """
        if self._closed:
            raise ValueError("this loader is closed: make a new one from its cursor")
        if self._ahead is None:
            self._ahead = self._begin()
        try:
            batch = next(self._ahead)
        except BaseException:
            # What works ahead is past the batch that failed: it begins again at the cursor.
            self._stop()
            raise
        self._consumed += self.global_batch
        return batch

    def _begin(self) -> Iterator[Batch]:
        """Start to make batches where the cursor stands."""
        making, work = self._making, self._making.tasks(self._consumed)
        if not self._prefetch or not self._workers:
            return map(making.make, work)
        # Processes read rows only, so that no more than the reader is pickled; batches are shaped
        # here.
        if self._kind == "process":
            depth = max(self._prefetch, self._workers)
            return _Shaped(
                making,
                WorkedAhead(
                    making.reader, work, workers=self._workers, depth=depth, kind="process"
                ),
            )
        if self._workers == 1:
            return Prefetched(map(making.make, work), self._prefetch)
        depth = max(self._prefetch, self._workers)
        return WorkedAhead(making.make, work, workers=self._workers, depth=depth)

    def _stop(self) -> None:
        close = getattr(self._ahead, "close", None)
        if close is not None:
            close()
        self._ahead = None

    def close(self) -> None:
        """End what works ahead; the cursor stays readable. May be called twice."""
        self._stop()
        self._closed = True

    def __enter__(self) -> "Loader":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the loader."""
        self.close()


class _Shaped(Iterator[Batch]):
    """Batches of rows that other processes read: small, so little goes through the pipes."""

    def __init__(self, making: _BatchMaker, rows: WorkedAhead[Task, tuple[Task, Rows]]) -> None:
        self._making, self._rows = making, rows

    def __next__(self) -> Batch:
        return self._making.shape(next(self._rows))

    def close(self) -> None:
        self._rows.close()


def check_dataset(dataset: Dataset) -> None:
    """Refuse a data set without samples with a ValueError."""
    if len(dataset) < 1:
        raise ValueError("the dataset holds no samples: at least 1 is needed")


def _check_cursor(cursor: Cursor, n: int) -> None:
    if cursor.epoch != cursor.consumed // n:
        raise ValueError(
            f"the cursor says epoch {cursor.epoch} after {cursor.consumed} samples, but with a "
            f"dataset of {n} samples that is epoch {cursor.consumed // n}: resume with the dataset "
            "the cursor was saved with"
        )
