"""Samples that are read together. R: rows, S: sequence length."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64Array: TypeAlias = NDArray[np.int64]
"""An array of 64-bit integers."""

PAD = -1
"""Number of the document that padding belongs to."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples of one length, as their data set stores them.

    Args:
        tokens: (R, S+1) ids of any integer type; the labels are ids 1 to S.
        documents: (R, S+1) int32, the document of each token, counted from 0 in its row; -1 is
            padding. Positions start again at 0 with each; no label is a token of the next one.
            None: a row is one document.
        targets: (R, S+1) bool, False where a token is never a label. None: every token may be.
        places: (R, S+1), the place of each token in its document; None: found from `documents`.
    """

    tokens: NDArray[np.integer]
    documents: NDArray[np.int32] | None = None
    targets: NDArray[np.bool_] | None = None
    places: NDArray[np.integer] | None = None

    def positions(self) -> Int64Array:
        """Return the place of each token that is read in its document: (R, S)."""
        rows, width = self.tokens.shape
        out = np.empty((rows, width - 1), dtype=np.int64)
        self.write_positions(out)
        return out

    def write_positions(self, out: Int64Array) -> None:
        """Write what `positions` returns to `out`."""
        if self.places is None and self.documents is None:
            out[:] = np.arange(out.shape[1])
        else:
            out[:] = self.all_places()[:, :-1]

    def all_places(self) -> NDArray[np.integer]:
        """Return the place of each token in its document: (R, S+1)."""
        if self.places is not None:
            return self.places
        first = np.zeros(self.tokens.shape, dtype=np.bool_)
        first[:, 0] = True
        if self.documents is not None:
            first[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return segments(np.flatnonzero(first), self.tokens.shape)[1]

    def kept_labels(self) -> NDArray[np.bool_] | None:
        """Return where a label is a target: (R, S); None if every one is."""
        keep = None if self.targets is None else self.targets[:, 1:]
        if self.documents is None:
            return keep
        read, labels = self.documents[:, :-1], self.documents[:, 1:]
        within = read == labels
        within &= labels != PAD
        return within if keep is None else within & keep


def segments(
    begins: Int64Array, shape: tuple[int, int], padding: Int64Array | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Number the documents of rows, and the tokens of each.

    Args:
        begins: where documents begin in the rows laid end to end, ascending; every row begins one.
        shape: (R, S+1).
        padding: those of `begins` where the padding of a row begins.

    Returns:
        Document of each token, counted from 0 in its row or -1, and its place in it; both of
        `shape`.
    """
    rows, width = shape
    lengths = np.diff(begins, append=rows * width)
    firsts = np.searchsorted(begins, np.arange(rows) * width)
    numbers = np.arange(len(begins)) - firsts[begins // width]
    if padding is not None:
        numbers[np.searchsorted(begins, padding)] = PAD
    places = np.arange(rows * width, dtype=np.int32)
    places -= np.repeat(begins.astype(np.int32), lengths)
    return np.repeat(numbers.astype(np.int32), lengths).reshape(shape), places.reshape(shape)


class Dataset(Protocol):
    """Data set of a loader: a number of samples, each a pure function of its index.

    A data set may also have some of these methods, which `read_rows` and the loaders then use:

    - `rows(indices)`: (R,) int64 to `Rows`, many samples at once;
    - `describe(i)`: where sample `i` comes from, for messages;
    - `sources` (names) and `source_of(indices)`: (R,) int64, the source of each sample;
    - `order(places, seed, stage)`: indices in an order of its own, as a mixture has.
    """

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        ...

    def sample(self, i: int) -> Int64Array:
        """Return sample `i` of [0, len): (S+1,) int64 ids; the labels are ids 1 to S."""
        ...


def describe(dataset: Dataset, i: int) -> str:
    """Describe where a sample comes from: file and document where the data set knows them."""
    said = getattr(dataset, "describe", None)
    return f"sample {i} ({said(i)})" if said else f"sample {i}"


def source_names(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the sources that samples are tagged with; one empty name if none are."""
    return getattr(dataset, "sources", ("",))


def source_of(dataset: Dataset, indices: Int64Array) -> Int64Array:
    """Return the source of each sample, a place in `source_names`."""
    said = getattr(dataset, "source_of", None)
    return said(indices) if said else np.zeros(len(indices), dtype=np.int64)


def read_rows(dataset: Dataset, indices: Int64Array, vocab_size: int | None = None) -> Rows:
    """Read samples of a data set, together where it can.

    Args:
        dataset: where they come from.
        indices: (R,) indices, R at least 1.
        vocab_size: refuse ids that are not in [0, vocab_size); None lets all pass.

    Raises:
        ValueError: samples differ in length or an id is outside the vocabulary; the sample is
            named. An error of the data set passes unchanged, with a note that names the sample.
    """
    together = getattr(dataset, "rows", None)
    try:
        rows = together(indices) if together else _stacked(dataset, indices)
    except Exception as error:
        if together and not getattr(error, "__notes__", None):
            _note_sample(dataset, indices, error)
        raise
    if vocab_size is not None:
        _check_ids(dataset, indices, rows.tokens, vocab_size)
    return rows


def _stacked(dataset: Dataset, indices: Int64Array) -> Rows:
    """Read samples one by one; an error of one gets a note that names it."""
    samples = []
    for i in indices.tolist():
        try:
            samples.append(dataset.sample(i))
        except Exception as error:
            error.add_note(f"while reading {describe(dataset, i)}")
            raise
    for row, i in zip(samples, indices.tolist(), strict=True):
        if row.ndim != 1 or row.shape != samples[0].shape or len(row) < 2:
            raise ValueError(
                f"{describe(dataset, i)} has shape {row.shape}: every sample of a dataset must be "
                f"(S + 1,) tokens of one length, and another has shape {samples[0].shape}"
            )
    return Rows(np.stack(samples))


def _note_sample(dataset: Dataset, indices: Int64Array, error: Exception) -> None:
    """Find the first sample that cannot be read alone either, and name it in the error."""
    for i in indices.tolist():
        try:
            dataset.sample(i)
        except Exception:
            error.add_note(f"while reading {describe(dataset, i)}")
            return


def _check_ids(
    dataset: Dataset, indices: Int64Array, tokens: NDArray[np.integer], vocab_size: int
) -> None:
    signed = tokens.dtype.kind == "i"
    if int(tokens.max()) < vocab_size and not (signed and int(tokens.min()) < 0):
        return
    wrong = tokens >= vocab_size
    if signed:
        wrong |= tokens < 0
    row, place = (int(found[0]) for found in np.nonzero(wrong))
    raise ValueError(
        f"token {int(tokens[row, place])} at place {place} of "
        f"{describe(dataset, int(indices[row]))} is not in the vocabulary of {vocab_size} ids: the "
        "data were made with another tokenizer, or vocab_size is too small"
    )
