"""Fingerprints of data sets: whether the same configuration still reads the same tokens.

A small data set is hashed whole; of a large one the sizes and some evenly spaced blocks are. The
result does not depend on where files are, in how many parts a cache keeps its tokens, or on the
bytes of an id. N: tokens of a stream.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron_data.mixture import Mixture
from kenotron_data.pack import Nanoset, PackedTokens
from kenotron_data.packed_documents import PackedDocuments
from kenotron_data.row_samples import Dataset
from kenotron_data.sft import SupervisedExamples
from kenotron_data.stream import TokenStream
from kenotron_data.subsets import Concatenated, Subset

METHOD = 1
"""Number of the way in which fingerprints are made; those of two ways are not comparable."""
WHOLE = 1 << 24
"""Tokens of a data set that is hashed whole."""
BLOCKS = 256
"""Blocks that are hashed of a larger one."""
BLOCK = 1024
"""Tokens of a block."""
SAMPLES = 16
"""Samples that are hashed of a data set of another class."""


@dataclass(frozen=True)
class Fingerprint:
    """Numbers and a hash that another data set does not have."""

    samples: int
    tokens: int
    """Of all files, those of held-out samples included."""
    checksum: str
    """BLAKE2b of sizes and of tokens, 16 hexadecimal digits."""
    method: int = METHOD

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Fingerprint":
        """Undo `to_dict`; ValueError for values that make no sense."""
        try:
            numbers = int(data["samples"]), int(data["tokens"])
            return cls(*numbers, str(data["checksum"]), int(data["method"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no fingerprint of data: {data!r} ({error!r})") from error

    def difference(self, other: "Fingerprint") -> str:
        """Say how `other` differs; empty where it does not, or was made in another way."""
        if self == other or self.method != other.method:
            return ""
        numbers = f"{self.samples:,} samples and {self.tokens:,} tokens"
        if (self.samples, self.tokens) == (other.samples, other.tokens):
            return f"both have {numbers}, but the tokens are others"
        return f"{numbers}, then {other.samples:,} samples and {other.tokens:,} tokens"


def fingerprint(dataset: Dataset) -> Fingerprint:
    """Return the fingerprint of a data set.

    Reads at most some `WHOLE` tokens or `BLOCKS` blocks of token streams, and `SAMPLES` samples of
    each data set of another class, which must depend on their index alone.
    """
    hashed = hashlib.blake2b(digest_size=8)
    tokens = _add(hashed, dataset, 1)
    return Fingerprint(len(dataset), tokens, hashed.hexdigest())


def _add(hashed: Any, dataset: Dataset, among: int) -> int:
    """Hash a data set, one of `among`; returns its tokens."""
    _numbers(hashed, [len(dataset)])
    if isinstance(dataset, Subset):
        _numbers(hashed, [dataset.start, dataset.stop])
        return _add(hashed, dataset.dataset, among)
    if isinstance(dataset, Concatenated):
        if isinstance(dataset, Mixture):
            _numbers(hashed, dataset.quanta)
        count = among * len(dataset.datasets)
        return sum(_add(hashed, part, count) for part in dataset.datasets)
    if isinstance(dataset, PackedTokens):  # one stream, however many files it is kept in
        return _add_stream(hashed, TokenStream(dataset.tokens), among)
    if isinstance(dataset, Nanoset | PackedDocuments):
        stream = TokenStream(dataset.source)
        _numbers(hashed, stream.offsets)
        return _add_stream(hashed, stream, among)
    if isinstance(dataset, SupervisedExamples):
        tokens, targets, ends = dataset.arrays
        _add_stream(hashed, TokenStream(ends), among)
        _add_stream(hashed, TokenStream(targets.view(np.uint8)), among)
        return _add_stream(hashed, TokenStream(tokens), among)
    return _add_samples(hashed, dataset)


def _add_stream(hashed: Any, stream: TokenStream, among: int) -> int:
    """Hash N and the tokens, or N and evenly spaced blocks of them; returns N."""
    n = len(stream)
    _numbers(hashed, [n])
    if n <= max(BLOCK, WHOLE // among):
        for start in range(0, n, WHOLE):
            width = min(WHOLE, n - start)
            hashed.update(_ids(stream.windows(np.array([start], dtype=np.int64), width)))
        return n
    starts = np.linspace(0, n - BLOCK, max(2, BLOCKS // among)).astype(np.int64)
    hashed.update(_ids(stream.windows(starts, BLOCK)))
    return n


def _add_samples(hashed: Any, dataset: Dataset) -> int:
    """Hash evenly spaced samples; returns the tokens of all, where they are equally long."""
    n, width = len(dataset), 1
    for i in np.unique(np.linspace(0, n - 1, SAMPLES).astype(np.int64)).tolist():
        try:
            sample = np.asarray(dataset.sample(i))
        except Exception as error:  # it is for the training to say so, when it reads the sample
            hashed.update(type(error).__name__.encode())
            continue
        width = max(1, len(sample) - 1)
        _numbers(hashed, [i, len(sample)])
        hashed.update(_ids(sample))
    return n * width


def _ids(tokens: NDArray[np.integer]) -> bytes:
    return tokens.astype("<u4").tobytes()


def _numbers(hashed: Any, numbers: Iterable[int]) -> None:
    hashed.update(np.array([*numbers], dtype="<i8").tobytes())
