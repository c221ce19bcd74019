"""Datasets of samples of equal length. N: tokens in the stream, S: sequence length."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kenotron_data.hashing import GOLDEN, below, derive_keys, mix64

Int64Array = NDArray[np.int64]


class Dataset(Protocol):
    """What a loader reads: a number of samples, each a pure function of its index."""

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        ...

    def sample(self, i: int) -> Int64Array:
        """Return sample `i` of [0, len): (S+1,) int64 ids; the labels are ids 1 to S."""
        ...


class PackedTokens:
    """Cut a stream of tokens into samples of S + 1 tokens that overlap by one.

    Sample i is tokens[i * S : i * S + S + 1], so every token but the first is predicted once. The
    last (N - 1) % S tokens belong to no sample.

    Args:
        tokens: (N,) ids of any integer type, in memory or memory-mapped.
        sequence_length: S, tokens a model reads per sample.

    Raises:
        ValueError: no (N,) integers, S is not positive, or the stream is shorter than S + 1.
    """

    def __init__(self, tokens: NDArray[np.integer], sequence_length: int) -> None:
        _check_stream(tokens)
        _check_length(sequence_length)
        if len(tokens) < sequence_length + 1:
            raise ValueError(
                f"the corpus has {len(tokens)} tokens, but one sample of sequence_length "
                f"{sequence_length} needs {sequence_length + 1}: give more text, hold out less "
                "for validation or lower sequence_length"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        """Return the number of whole samples, (N - 1) // S."""
        return (len(self.tokens) - 1) // self.sequence_length

    def sample(self, i: int) -> Int64Array:
        """Return sample `i`: (S+1,) int64; IndexError where there is none."""
        _check_index(i, len(self))
        start = i * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int64)


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
        _check_index(i, self.samples)
        start = mix64(self._key ^ np.uint64(i))
        return below(mix64(start + self._steps), self.vocab_size).astype(np.int64)


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
    _check_stream(tokens)
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must be 0 or more and less than 1, not {validation_fraction}"
        )
    held_out = round(len(tokens) * validation_fraction)
    return tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]


def _check_stream(tokens: NDArray[np.integer]) -> None:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"a stream of tokens has one dimension of integers, but {tokens.dtype} of shape "
            f"{tokens.shape} was given"
        )


def _check_length(sequence_length: int) -> None:
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, but {sequence_length} was given")


def _check_index(i: int, n: int) -> None:
    if not 0 <= i < n:
        raise IndexError(f"there is no sample {i} in a dataset of {n} samples")
