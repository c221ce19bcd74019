"""Synthetic tokens, for runs that only compare: no file, no tokenizer, no network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kenotron_data import Int64Array, Rows

SAMPLES = 4096


@dataclass(frozen=True)
class MadeUpTokens:
    """A data set whose rows all have their own number of targets, from 1 to all.

    ``documents``: rows are of several documents, of lengths of their own.
    """

    vocab_size: int
    sequence: int
    seed: int
    documents: bool = False

    def __len__(self) -> int:
        """Samples of an epoch."""
        return SAMPLES

    def sample(self, i: int) -> Int64Array:
        """Sample ``i``: (S+1,) int64, uniform over the vocabulary."""
        draw = np.random.default_rng([self.seed, i])
        return draw.integers(0, self.vocab_size, self.sequence + 1)

    def rows(self, indices: Int64Array) -> Rows:
        """Samples together, with targets and documents."""
        tokens = np.stack([self.sample(int(i)) for i in indices])
        places = np.arange(self.sequence + 1)[None]
        count = 1 + (indices * 7 + indices // 3) % self.sequence
        numbers = self._documents(indices) if self.documents else None
        return Rows(tokens, numbers, places <= count[:, None])

    def _documents(self, indices: Int64Array) -> np.ndarray:
        """(R, S+1) int32; the first document has two tokens or more, so a row has a target."""
        numbers = np.zeros((len(indices), self.sequence + 1), dtype=np.int32)
        for row, i in zip(numbers, indices, strict=True):
            draw = np.random.default_rng([self.seed, int(i), 1])
            for cut in draw.integers(2, self.sequence + 2, 3):
                row[cut:] += 1
        return numbers
