"""Data sets made of others: a stretch of one, or several in a row."""

from collections.abc import Mapping

import numpy as np

from kenotron_data.pack import check_index, check_indices
from kenotron_data.row_samples import (
    Dataset,
    Int64Array,
    Rows,
    describe,
    read_rows,
    source_names,
    source_of,
)


class Subset:
    """The samples [start, stop) of a data set.

    Args:
        dataset: where they come from.
        start: first sample.
        stop: the sample after the last.

    Raises:
        ValueError: the range holds no sample or reaches beyond the data set.
    """

    def __init__(self, dataset: Dataset, start: int, stop: int) -> None:
        if not 0 <= start < stop <= len(dataset):
            raise ValueError(
                f"samples [{start}, {stop}) are no part of a dataset of {len(dataset)} samples"
            )
        self.dataset, self.start, self.stop = dataset, start, stop
        self.sources = source_names(dataset)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.stop - self.start

    def sample(self, i: int) -> Int64Array:
        """Return sample `i`: (S+1,) int64; IndexError where there is none."""
        check_index(i, len(self))
        return self.dataset.sample(self.start + i)

    def rows(self, indices: Int64Array) -> Rows:
        """Read samples together; IndexError where there is none."""
        check_indices(indices, len(self))
        return read_rows(self.dataset, self.start + indices)

    def describe(self, i: int) -> str:
        """Say where sample `i` comes from."""
        return describe(self.dataset, self.start + i)

    def source_of(self, indices: Int64Array) -> Int64Array:
        """Return the source of each sample."""
        return source_of(self.dataset, self.start + indices)


class Concatenated:
    """Data sets one after the other; samples are tagged with the one they come from.

    Args:
        sources: data sets by name, all with samples of one length.

    Raises:
        ValueError: there is no source, or one is empty.
    """

    def __init__(self, sources: Mapping[str, Dataset]) -> None:
        if not sources:
            raise ValueError("no source was given: at least one is needed")
        for name, dataset in sources.items():
            if len(dataset) < 1:
                raise ValueError(f"source {name!r} holds no samples: at least 1 is needed")
        self.sources = tuple(sources)
        self.datasets = tuple(sources.values())
        sizes = np.array([len(dataset) for dataset in self.datasets], dtype=np.int64)
        self.sizes = sizes
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(sizes)])

    def __len__(self) -> int:
        """Return the number of samples of all sources."""
        return int(self.offsets[-1])

    def source_of(self, indices: Int64Array) -> Int64Array:
        """Return the source of each sample, a place in `sources`."""
        return np.searchsorted(self.offsets, indices, side="right") - 1

    def sample(self, i: int) -> Int64Array:
        """Return sample `i`: (S+1,) int64; IndexError where there is none."""
        check_index(i, len(self))
        source, local = self._place(i)
        return self.datasets[source].sample(local)

    def rows(self, indices: Int64Array) -> Rows:
        """Read samples together; IndexError where there is none.

        Raises:
            ValueError: the samples of two sources differ in length.
        """
        check_indices(indices, len(self))
        of = self.source_of(indices)
        found = {
            source: read_rows(self.datasets[source], indices[of == source] - self.offsets[source])
            for source in np.unique(of).tolist()
        }
        first, *others = found.items()
        for source, rows in others:
            if rows.tokens.shape[1] != first[1].tokens.shape[1]:
                raise ValueError(
                    f"samples of source {self.sources[source]!r} have {rows.tokens.shape[1]} "
                    f"tokens, those of {self.sources[first[0]]!r} {first[1].tokens.shape[1]}: the "
                    "sources of a mixture need one sequence length"
                )
        if not others:
            return first[1]
        return _merged({source: (of == source, rows) for source, rows in found.items()})

    def describe(self, i: int) -> str:
        """Name the source of sample `i`, with the source's own description."""
        source, local = self._place(i)
        return f"source {self.sources[source]!r}: {describe(self.datasets[source], local)}"

    def _place(self, i: int) -> tuple[int, int]:
        source = int(np.searchsorted(self.offsets, i, side="right")) - 1
        return source, i - int(self.offsets[source])


def _merged(found: dict[int, tuple[np.ndarray, Rows]]) -> Rows:
    """Put rows of several sources back in order; what only some of them say is filled in."""
    masks, parts = zip(*found.values(), strict=True)
    shape = (len(masks[0]), parts[0].tokens.shape[1])
    kinds = {rows.tokens.dtype for rows in parts}
    tokens = np.empty(shape, dtype=kinds.pop() if len(kinds) == 1 else np.int64)
    documents = targets = places = None
    if any(rows.documents is not None for rows in parts):
        documents = np.zeros(shape, dtype=np.int32)
        places = np.empty(shape, dtype=np.int32)
        places[:] = np.arange(shape[1], dtype=np.int32)
    if any(rows.targets is not None for rows in parts):
        targets = np.ones(shape, dtype=np.bool_)
    for mask, rows in zip(masks, parts, strict=True):
        tokens[mask] = rows.tokens
        if documents is not None and places is not None and rows.documents is not None:
            documents[mask] = rows.documents
            places[mask] = rows.all_places()
        if targets is not None and rows.targets is not None:
            targets[mask] = rows.targets
    return Rows(tokens, documents, targets, places)
