"""Batches in an order that depends on the seed alone, for one data rank.

Global sample number g of a stage is place g % n of the permutation of epoch g // n. A global batch
is the next rows of that endless list; data ranks own consecutive blocks of it, and micro-batches
consecutive blocks of those.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from kenotron_data.batch import PADDING, Batch, RowSplit, TargetMask
from kenotron_data.cursor import Cursor
from kenotron_data.pack import Dataset, Int64Array
from kenotron_data.prefetch import Prefetched
from kenotron_data.sampler import permutation_key, permute


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Everything a batch follows from; the prefetch thread holds this and not the loader."""

    dataset: Dataset
    split: RowSplit
    seed: int
    stage: int
    target_mask: TargetMask | None

    def batch(self, consumed: int) -> Batch:
        """Build this rank's part of the global batch that follows `consumed` samples."""
        samples_R = self.split.rows(consumed)
        return self.split.assemble(
            self.dataset, samples_R, self.indices(samples_R), self.target_mask
        )

    def batches(self, consumed: int) -> Iterator[Batch]:
        """Yield batches without end."""
        while True:
            yield self.batch(consumed)
            consumed += self.split.global_batch

    def indices(self, samples_R: Int64Array) -> Int64Array:
        """Map global sample numbers to indices of the dataset, epoch by epoch."""
        n = len(self.dataset)
        epochs = samples_R // n
        indices = np.empty_like(samples_R)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            key = permutation_key(self.seed, int(epoch), self.stage)
            indices[rows] = permute(samples_R[rows] % n, n, key)
        return indices


class Loader(Iterator[Batch]):
    """Iterate without end over this data rank's batches of a shuffled dataset.

    For equal products dp_size * microbatches * micro_batch_size the global batches are equal, row
    by row. Each epoch has its own order in which every sample comes once; an epoch may end inside
    a batch. A loader made with the cursor of another continues exactly where that one stood.

    Args:
        dataset: samples of one length.
        micro_batch_size: B, rows of a micro-batch.
        microbatches: M, micro-batches of a step on one rank.
        dp_rank: this rank along the data axis.
        dp_size: ranks of the data axis.
        seed: the order's seed.
        cursor: where to begin. Its stage is part of the order's key.
        target_mask: function of (R,) int64 sample numbers (R = M * B) and S to (R, S) bool, False
            where a label becomes -100. It must depend on the sample numbers alone; it is called
            from the prefetch thread.
        prefetch: batches prepared ahead in a thread; 0 prepares each in `next()`.

    Raises:
        ValueError: a size is not positive, the rank is out of range, the dataset is empty, or the
            cursor was not saved with a dataset of this size.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 42,
        cursor: Cursor = Cursor(),
        target_mask: TargetMask | None = None,
        prefetch: int = 2,
    ) -> None:
        _check_dataset(dataset)
        _check_cursor(cursor, len(dataset))
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more batches, but {prefetch} was given")
        self._split = RowSplit(
            micro_batch_size=micro_batch_size,
            microbatches=microbatches,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
        self._order = _Order(
            dataset=dataset,
            split=self._split,
            seed=seed,
            stage=cursor.stage,
            target_mask=target_mask,
        )
        self._consumed = cursor.consumed
        self._prefetch = prefetch
        self._ahead: Prefetched[Batch] | None = None
        self._closed = False

    @property
    def cursor(self) -> Cursor:
        """Where the user stands: batches prepared ahead do not count."""
        epoch = self._consumed // len(self._order.dataset)
        return Cursor(self._order.stage, epoch, self._consumed)

    @property
    def global_batch(self) -> int:
        """Rows of the global batch."""
        return self._split.global_batch

    def __next__(self) -> Batch:
        """Return the next batch and move the cursor by the global batch.

        Errors of the dataset and of the mask appear here and leave the cursor where it was; the
        next call tries the same batch again. ValueError after `close()`.
        """
        if self._closed:
            raise ValueError("this loader is closed: make a new one from its cursor")
        batch = self._order.batch(self._consumed) if self._prefetch == 0 else self._next_ahead()
        self._consumed += self.global_batch
        return batch

    def _next_ahead(self) -> Batch:
        """Take a batch from the thread, which is started where the cursor stands."""
        if self._ahead is None:
            self._ahead = Prefetched(self._order.batches(self._consumed), self._prefetch)
        try:
            return next(self._ahead)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def close(self) -> None:
        """End the prefetch thread; the cursor stays readable. May be called twice."""
        self._stop()
        self._closed = True

    def __enter__(self) -> "Loader":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the loader."""
        self.close()


def validation_batches(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    microbatches: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    target_mask: TargetMask | None = None,
) -> Iterator[Batch]:
    """Iterate once over a dataset in its own order, without shuffling.

    The last global batch is filled with rows of zeros whose labels are all -100 and whose sample
    number is -1, so every data rank gets the same number of batches and micro-batches. Arguments
    and errors are those of `Loader`; they are checked at the call.

    Returns:
        Iterator of ceil(len(dataset) / global batch) batches.
    """
    _check_dataset(dataset)
    split = RowSplit(
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )
    n = len(dataset)
    numbers = (split.rows(first) for first in range(0, n, split.global_batch))
    return (
        split.assemble(dataset, rows, np.where(rows < n, rows, PADDING), target_mask)
        for rows in numbers
    )


def _check_dataset(dataset: Dataset) -> None:
    if len(dataset) < 1:
        raise ValueError("the dataset holds no samples: at least 1 is needed")


def _check_cursor(cursor: Cursor, n: int) -> None:
    if cursor.epoch != cursor.consumed // n:
        raise ValueError(
            f"the cursor says epoch {cursor.epoch} after {cursor.consumed} samples, but with a "
            f"dataset of {n} samples that is epoch {cursor.consumed // n}: resume with the dataset "
            "the cursor was saved with"
        )
