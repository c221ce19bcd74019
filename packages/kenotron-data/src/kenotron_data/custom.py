"""Data of one's own: a function of the index, something indexable, or anything iterable."""

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kenotron_data.batch import Batch
from kenotron_data.cursor import Cursor
from kenotron_data.loader import Loader
from kenotron_data.pack import check_index
from kenotron_data.prefetch import Prefetched
from kenotron_data.row_samples import Int64Array, read_rows
from kenotron_data.row_split import PADDING, BatchRows, Microbatches, RowSplit, TargetMask

log = logging.getLogger(__name__)

Source: TypeAlias = Callable[[int], Any] | Sequence[Any] | Iterable[Any]
"""f(i) -> sample; or `len()` and `[i]`; or what can be iterated."""


class CustomSamples:
    """Read samples of a function or of something indexable as a data set.

    A sample is (S+1,) integer ids: an array, a tensor, a list, or a mapping with `input_ids`. It
    must depend on its index alone: the order, other ranks and a resumed run rely on it.

    Args:
        source: f(i) -> sample, or an object with `len()` and `[i]`.
        samples: samples of an epoch; None: `len(source)`.
        name: what messages call the source.

    Raises:
        ValueError: the number of samples is not known or not positive, or the source is neither.
    """

    def __init__(self, source: Any, *, samples: int | None = None, name: str = "custom") -> None:
        if not (hasattr(source, "__getitem__") or callable(source)):
            raise ValueError(
                f"source {name!r}: {type(source).__name__} is neither callable nor indexable"
            )
        sized: Any = source if hasattr(source, "__len__") else ()
        known = (len(sized) or None) if samples is None else samples
        if known is None or known < 1:
            raise ValueError(
                f"source {name!r} has {known or 'no known number of'} samples: give the samples of "
                "an epoch, at least 1, as samples="
            )
        self.source, self.samples, self.name = source, known, name
        self.sources = (name,)
        self._read: Callable[[int], Any] = getattr(source, "__getitem__", source)

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.samples

    def sample(self, i: int) -> Int64Array:
        """Return sample `i`: (S+1,) int64; IndexError where there is none."""
        check_index(i, self.samples)
        return as_sample(self._read(i))

    def describe(self, i: int) -> str:
        """Name the source."""
        return f"source {self.name!r}"


def as_sample(item: Any) -> Int64Array:
    """Turn what a source gives into ids: (S+1,) int64.

    Raises:
        ValueError: it is no sequence of integers; what it is, is said.
    """
    ids = item["input_ids"] if isinstance(item, Mapping) and "input_ids" in item else item
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise ValueError(f"a sample is a list of S + 1 integer ids, but {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) < 2:
        raise ValueError(
            f"a sample is S + 1 integer ids (an array, a tensor, a list, or a mapping with "
            f"'input_ids'), but {type(item).__name__} gave {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64, copy=False)


class IterableLoader(Iterator[Batch]):
    """Iterate once over this data rank's batches of an iterable of samples, in its order.

    Without an index there is one epoch, in the order of the iterable: nothing is shuffled, and the
    last samples, fewer than a global batch, are left out. Every rank iterates over all samples and
    keeps its rows. A run that resumes calls `skip(n)` of the iterable (as streaming data sets of
    Hugging Face have it) for the samples that its cursor counts, or else reads them again and
    throws them away; the log names which. The iterable must give the same samples each time.

    Args:
        source: iterable of samples, see `CustomSamples`; all of one length.
        name: what messages call it.
        cursor: where to begin; its epoch is 0.

    The other arguments are those of `Loader`; a thread works `prefetch` batches ahead.

    Raises:
        ValueError: a size is wrong, the cursor's epoch is not 0, or the source ends before the
            cursor. `next()` raises what the source raises, with the number of the sample, and
            after that only says so again: the source cannot go back.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        micro_batch_size: int,
        microbatches: Microbatches,
        dp_rank: int = 0,
        dp_size: int = 1,
        batch: BatchRows = None,
        cursor: Cursor = Cursor(),
        target_mask: TargetMask | None = None,
        prefetch: int = 2,
        vocab_size: int | None = None,
        name: str = "custom",
    ) -> None:
        if cursor.epoch:
            raise ValueError(
                f"the cursor says epoch {cursor.epoch}, but source {name!r} has no index and is "
                "read once only: epoch 0"
            )
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more batches, but {prefetch} was given")
        self._split = RowSplit(
            micro_batch_size=micro_batch_size,
            microbatches=microbatches,
            dp_rank=dp_rank,
            dp_size=dp_size,
            batch=batch,
        )
        self._stage, self._consumed = cursor.stage, cursor.consumed
        self._error: BaseException | None = None
        batches = _batches(source, self._split, cursor.consumed, target_mask, vocab_size, name)
        self._ahead = Prefetched(batches, prefetch) if prefetch else batches

    @property
    def cursor(self) -> Cursor:
        """Position of the user: batches prepared ahead do not count."""
        return Cursor(self._stage, 0, self._consumed)

    @property
    def global_batch(self) -> int:
        """Rows of the next global batch."""
        return self._split.at(self._consumed).global_batch

    def __next__(self) -> Batch:
        """Return the next batch; StopIteration at the end of the source."""
        if self._error is not None:
            raise ValueError(
                "an error ended this loader's source, which cannot go back: make a new one from "
                "its cursor"
            ) from self._error
        try:
            batch = next(self._ahead)
        except StopIteration:
            raise
        except BaseException as error:
            self._error = error
            raise
        self._consumed += self.global_batch
        return batch

    def close(self) -> None:
        """End the thread; the cursor stays readable. May be called twice."""
        self._ahead.close()

    def __enter__(self) -> "IterableLoader":
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the loader."""
        self.close()


def custom_loader(
    source: Source, *, samples: int | None = None, name: str = "custom", **options: Any
) -> Loader | IterableLoader:
    """Make a loader for data of one's own.

    Args:
        source: a function of the index, something indexable, or an iterable; the first that fits.
            A `Dataset` is taken as it is.
        samples: samples of an epoch, where a function or something without `len()` is given.
        name: what messages call the source.
        options: arguments of `Loader`. For an iterable: those of `IterableLoader`, and of the
            others (seed, workers, worker_kind) none.

    Raises:
        ValueError: the source is none of these, or see `Loader` and `IterableLoader`.
    """
    if hasattr(source, "sample") and hasattr(source, "__len__"):
        return Loader(source, **options)  # pyrefly: ignore[bad-argument-type]
    if callable(source) or (hasattr(source, "__getitem__") and _is_sized(source, samples)):
        return Loader(CustomSamples(source, samples=samples, name=name), **options)
    if not hasattr(source, "__iter__"):
        raise ValueError(
            f"source {name!r}: {type(source).__name__} is no function of an index, not indexable "
            "and not iterable"
        )
    return IterableLoader(source, name=name, **options)


def _is_sized(source: Any, samples: int | None) -> bool:
    return samples is not None or hasattr(source, "__len__")


def _batches(
    source: Iterable[Any],
    split: RowSplit,
    consumed: int,
    target_mask: TargetMask | None,
    vocab_size: int | None,
    name: str,
) -> Generator[Batch]:
    """Yield this rank's batches; generators start at the first `next()`, so in the thread."""
    samples = _from(source, consumed, name)
    while True:
        cut = split.at(consumed)
        rows = cut.rows(consumed)
        window = _Window(samples, consumed, cut.global_batch, rows, name)
        if not len(window):
            return
        read = read_rows(window, np.where(rows == PADDING, consumed, rows), vocab_size)
        yield split.assemble(read, rows, np.zeros_like(rows), target_mask)
        consumed += cut.global_batch


def _from(source: Iterable[Any], consumed: int, name: str) -> Iterator[Any]:
    """Iterate from the sample that follows `consumed` ones."""
    skip = getattr(source, "skip", None)
    if not consumed:
        return iter(source)
    if skip is not None:
        log.warning("source %r has no index: its skip(%d) finds the cursor", name, consumed)
        return iter(skip(consumed))
    log.warning(
        "source %r has neither index nor skip(): %d samples are read again to find the cursor",
        name,
        consumed,
    )
    samples = iter(source)
    replayed = sum(1 for _ in itertools.islice(samples, consumed))
    if replayed < consumed:
        raise ValueError(
            f"source {name!r} ends after {replayed} samples, but the cursor counts {consumed}: "
            "resume with the source the cursor was saved with"
        )
    return samples


class _Window:
    """One global batch of an iterable, by sample number; only this rank's rows are kept."""

    def __init__(
        self, samples: Iterator[Any], first: int, count: int, rows: Int64Array, name: str
    ) -> None:
        self._name, self._count = name, count
        self._kept: dict[int, Any] = {}
        own = {first, *rows.tolist()}  # the first one has the length of padding
        for i in range(first, first + count):
            try:
                item = next(samples)
            except StopIteration:
                self._count = 0
                return
            except Exception as error:
                error.add_note(f"while reading sample {i} (source {name!r})")
                raise
            if i in own:
                self._kept[i] = item

    def __len__(self) -> int:
        return self._count

    def sample(self, i: int) -> Int64Array:
        return as_sample(self._kept[i])

    def describe(self, i: int) -> str:
        return f"source {self._name!r}"
