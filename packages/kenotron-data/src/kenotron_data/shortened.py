"""Documents that are cut after a number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kenotron_data.tokenizer import Ids, TextTokenizer


@dataclass(frozen=True, kw_only=True)
class ShortenedTokens:
    """A tokenizer whose documents have at most a number of tokens; the end is one of them.

    Args:
        tokenizer: makes the ids.
        longest: tokens of the longest document, at least 1.

    Raises:
        ValueError: `longest` is not positive.
    """

    tokenizer: TextTokenizer
    longest: int

    def __post_init__(self) -> None:
        """Check the length."""
        if self.longest < 1:
            raise ValueError(f"longest must be at least 1 token, but {self.longest} was given")

    @property
    def name(self) -> str:
        """The tokenizer's name."""
        return self.tokenizer.name

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.vocab_size

    @property
    def end(self) -> int | None:
        """The tokenizer's."""
        return self.tokenizer.end

    @property
    def fingerprint(self) -> str:
        """Another one for each length."""
        return f"{self.tokenizer.fingerprint}:at most {self.longest}"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text; one that is too long keeps its first ids and its end."""
        return [self._cut(ids) for ids in self.tokenizer.encode(texts)]

    def _cut(self, ids: Ids) -> Ids:
        if len(ids) <= self.longest:
            return ids
        if self.end is None:
            return ids[: self.longest]
        return np.append(ids[: self.longest - 1], ids[-1:])
