"""Data sets of samples of equal length. N: tokens in the stream, S: sequence length."""

import numpy as np
from numpy.typing import NDArray

from kenotron_data.hashing import GOLDEN, below, derive_keys, mix64
from kenotron_data.row_samples import Dataset, Int64Array, Rows
from kenotron_data.stream import TokenSource, TokenStream, check_stream

__all__ = ["Dataset", "Nanoset", "PackedTokens", "RandomTokens", "split"]


class _Windows:
    """Samples that are windows of S + 1 tokens of a stream, at places that a subclass computes."""

    def __init__(self, source: TokenSource, sequence_length: int, separate: bool) -> None:
        _check_length(sequence_length)
        self._stream = TokenStream(source)
        self.sequence_length = sequence_length
        self.separate_documents = separate

    def __len__(self) -> int:
        """Return the number of samples."""
        raise TypeError("only its subclasses know where samples begin")

    def starts(self, indices: Int64Array) -> Int64Array:
        """Return the places in the stream where samples begin."""
        raise TypeError("only its subclasses know where samples begin")

    def sample(self, i: int) -> Int64Array:
        """Return sample `i`: (S+1,) int64; IndexError where there is none."""
        check_index(i, len(self))
        starts = self.starts(np.array([i], dtype=np.int64))
        return self._stream.windows(starts, self.sequence_length + 1)[0].astype(np.int64)

    def rows(self, indices: Int64Array) -> Rows:
        """Read samples together; IndexError where there is none."""
        check_indices(indices, len(self))
        starts, width = self.starts(indices), self.sequence_length + 1
        tokens = self._stream.windows(starts, width)
        if not self.separate_documents:
            return Rows(tokens)
        documents, places = self._stream.documents(starts, width)
        return Rows(tokens, documents, places=places)

    def describe(self, i: int) -> str:
        """Name the file and the document where sample `i` begins."""
        return self._stream.describe(int(self.starts(np.array([i], dtype=np.int64))[0]))


class PackedTokens(_Windows):
    """Cut a stream of tokens into samples of S + 1 tokens that overlap by one.

    Sample i is tokens[i * S : i * S + S + 1], so every token but the first is predicted once. The
    last (N - 1) % S tokens belong to no sample. The files of a folder are one stream.

    Args:
        tokens: (N,) ids of any integer type, in memory or memory-mapped; a `TokenFile`, a
            `TokenFolder`, or several files in order.
        sequence_length: S, tokens a model reads per sample.
        separate_documents: tell the documents of a sample apart, where the files have an index.

    Raises:
        ValueError: no (N,) integers, S is not positive, or the stream is shorter than S + 1.
    """

    def __init__(
        self, tokens: TokenSource, sequence_length: int, *, separate_documents: bool = False
    ) -> None:
        super().__init__(tokens, sequence_length, separate_documents)
        self.tokens = tokens
        if len(self._stream) < sequence_length + 1:
            raise ValueError(
                f"the corpus has {len(self._stream)} tokens, but one sample of sequence_length "
                f"{sequence_length} needs {sequence_length + 1}: give more text, hold out less "
                "for validation or lower sequence_length"
            )

    def __len__(self) -> int:
        """Return the number of whole samples, (N - 1) // S."""
        return (len(self._stream) - 1) // self.sequence_length

    def starts(self, indices: Int64Array) -> Int64Array:
        """Return the places in the stream where samples begin."""
        return indices * self.sequence_length


class Nanoset(_Windows):
    """Cut each file of tokens into samples of S + 1 tokens that do not overlap, as Nanotron does.

    What is left at the end of a file, S tokens or fewer, belongs to no sample; the first token of
    a sample is never a label.

    Args:
        source: a `TokenFolder`, a `TokenFile` or several in order.
        sequence_length: S, tokens a model reads per sample.
        separate_documents: tell the documents of a sample apart, where the files have an index.

    Raises:
        ValueError: S is not positive, or no file holds S + 1 tokens.
    """

    def __init__(
        self, source: TokenSource, sequence_length: int, *, separate_documents: bool = False
    ) -> None:
        super().__init__(source, sequence_length, separate_documents)
        self.source = source
        counts = np.diff(self._stream.offsets) // (sequence_length + 1)
        self._first = np.concatenate([[0], np.cumsum(counts)])  # each file's first sample
        if not self._first[-1]:
            raise ValueError(
                f"{source}: no file holds the {sequence_length + 1} tokens that one sample of "
                f"sequence_length {sequence_length} needs"
            )

    def __len__(self) -> int:
        """Return the number of whole samples of all files."""
        return int(self._first[-1])

    def starts(self, indices: Int64Array) -> Int64Array:
        """Return the places in the stream where samples begin."""
        files = np.searchsorted(self._first, indices, side="right") - 1
        within = (indices - self._first[files]) * (self.sequence_length + 1)
        return self._stream.offsets[files] + within


class RandomTokens:
    """Synthetic samples of uniform ids: sample i is a pure function of (seed, i).

    Args:
        vocab_size: ids are drawn from [0, vocab_size).
        sequence_length: S, tokens a model reads per sample.
        seed: samples of different seeds are independent.
        samples: samples of an epoch; the default is endless for all purposes.

    Raises:
        ValueError: a number is not positive, or vocab_size is above 2**32.
    """

    def __init__(
        self, vocab_size: int, sequence_length: int, seed: int, samples: int = 10**12
    ) -> None:
        if not 1 <= vocab_size <= 2**32:
            raise ValueError(f"vocab_size must be from 1 to 2**32, but {vocab_size} was given")
        _check_length(sequence_length)
        if samples < 1:
            raise ValueError(f"a dataset needs at least 1 sample, but {samples} were asked for")
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.samples = samples
        self._key = derive_keys("random tokens", seed, count=1)  # (1,)
        self._steps = np.arange(1, sequence_length + 2, dtype=np.uint64) * GOLDEN  # (S+1,)

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.samples

    def sample(self, i: int) -> Int64Array:
        """Return sample `i`: (S+1,) int64; IndexError where there is none."""
        check_index(i, self.samples)
        return self.rows(np.array([i], dtype=np.int64)).tokens[0].astype(np.int64, copy=False)

    def rows(self, indices: Int64Array) -> Rows:
        """Make samples together; IndexError where there is none."""
        check_indices(indices, self.samples)
        start = mix64(self._key ^ indices.astype(np.uint64))
        hashes = mix64(start[:, None] + self._steps)
        return Rows(below(hashes, self.vocab_size).astype(np.int64))


def split(
    tokens: NDArray[np.integer], validation_fraction: float
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Hold out the tail of a stream for validation.

    Args:
        tokens: (N,) ids.
        validation_fraction: share of the tokens to hold out, in [0, 1).

    Returns:
        Views of the training tokens and of the last round(N * fraction) tokens; no token is in
        both.

    Raises:
        ValueError: no (N,) integers, or the fraction is not in [0, 1).
    """
    check_stream(tokens)
    check_fraction(validation_fraction)
    held_out = round(len(tokens) * validation_fraction)
    return tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]


def check_fraction(validation_fraction: float) -> None:
    """Refuse a fraction that is not in [0, 1) with a ValueError."""
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must be 0 or more and less than 1, not {validation_fraction}"
        )


def check_index(i: int, n: int) -> None:
    """Refuse an index that is not in [0, n) with an IndexError."""
    if not 0 <= i < n:
        raise IndexError(f"there is no sample {i} in a dataset of {n} samples")


def check_indices(indices: Int64Array, n: int) -> None:
    """Refuse indices that are not all in [0, n) with an IndexError that names one."""
    if indices.size and not (0 <= indices.min() and indices.max() < n):
        wrong = indices[(indices < 0) | (indices >= n)]
        check_index(int(wrong[0]), n)


def _check_length(sequence_length: int) -> None:
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, but {sequence_length} was given")
