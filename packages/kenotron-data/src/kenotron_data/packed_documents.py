"""Samples of whole documents, as a pack index put them together. W = S + 1 tokens of a sample."""

import numpy as np

from kenotron_data.best_fit import PackIndex, read_pack_index
from kenotron_data.pack import check_index, check_indices
from kenotron_data.rows import PAD, Int64Array, Rows
from kenotron_data.token_file import TokenFile
from kenotron_data.token_folder import TokenFolder


class PackedDocuments:
    """Samples that hold whole documents, padded at the end; padding has no label.

    Only documents longer than a sample are cut. `write_pack_index` says once for each file which
    documents share a sample; positions start anew with each of them.

    Args:
        source: a file, or a folder of files, each with its pack index.
        sequence_length: S, tokens a model reads per sample.
        separate_documents: False lets the documents of a sample run on as one.

    Raises:
        FileNotFoundError: a file has no pack index for this sequence length.
        ValueError: a pack index is truncated or belongs to another file.
    """

    def __init__(
        self,
        source: TokenFile | TokenFolder,
        sequence_length: int,
        *,
        separate_documents: bool = True,
    ) -> None:
        self.source, self.sequence_length = source, sequence_length
        self.separate_documents = separate_documents
        self.files = (source,) if isinstance(source, TokenFile) else source.files
        self._packs = tuple(read_pack_index(file, sequence_length) for file in self.files)
        self._first: Int64Array = np.cumsum([0, *map(len, self._packs)])  # each file's first sample

    def __reduce__(self) -> tuple[object, ...]:
        """Let a copy in another process map the files itself."""
        return _opened, (self.source, self.sequence_length, self.separate_documents)

    def __len__(self) -> int:
        """Return the number of samples of all files."""
        return int(self._first[-1])

    def sample(self, i: int) -> Int64Array:
        """Return the tokens of sample `i`, padded with 0: (S+1,) int64; IndexError if none.

        Which places are padding, `rows` says.
        """
        check_index(i, len(self))
        return self.rows(np.array([i], dtype=np.int64)).tokens[0].astype(np.int64)

    def rows(self, indices: Int64Array) -> Rows:
        """Read samples together; IndexError where there is none."""
        check_indices(indices, len(self))
        shape = (len(indices), self.sequence_length + 1)
        kind = np.result_type(*{file.tokens.dtype for file in self.files})
        tokens = np.zeros(shape, dtype=kind)
        documents = np.full(shape, PAD, dtype=np.int32)
        of = np.searchsorted(self._first, indices, side="right") - 1
        for number in np.unique(of).tolist():
            rows = np.flatnonzero(of == number)
            self._fill(number, indices[rows] - self._first[number], rows, tokens, documents)
        if not self.separate_documents:
            np.minimum(documents, 0, out=documents)
        return Rows(tokens, documents)

    def describe(self, i: int) -> str:
        """Name the file of sample `i`, and its first document."""
        number = int(np.searchsorted(self._first, i, side="right")) - 1
        file, pack = self.files[number], self._packs[number]
        start = int(pack.starts[int(pack.offsets[i - int(self._first[number])])])
        return f"{file}, document {file.document_at(start)} and what is packed with it"

    def _fill(
        self,
        number: int,
        samples: Int64Array,
        rows: np.ndarray,
        tokens: np.ndarray,
        documents: np.ndarray,
    ) -> None:
        """Copy the pieces of samples of one file to their rows, all in one call."""
        file, pack = self.files[number], self._packs[number]
        first, counts, starts, lengths = _pieces(pack, samples)
        within = np.arange(len(starts)) - np.repeat(first, counts)  # number of a piece in its row
        used = np.add.reduceat(lengths, first)
        width = tokens.shape[1]
        if int((starts + lengths).max()) > len(file) or int(used.max()) > width:
            raise ValueError(f"{file}: its pack index is corrupt: a piece lies outside the tokens")
        filled = np.zeros(tokens.shape, dtype=np.bool_)
        filled[rows] = np.arange(width) < used[:, None]
        before = np.cumsum(lengths) - lengths
        tokens[filled] = file.tokens[np.arange(used.sum()) + np.repeat(starts - before, lengths)]
        documents[filled] = np.repeat(within, lengths)


def _opened(
    source: TokenFile | TokenFolder, sequence_length: int, separate_documents: bool
) -> PackedDocuments:
    return PackedDocuments(source, sequence_length, separate_documents=separate_documents)


def _pieces(
    pack: PackIndex, samples: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Look up the pieces of samples: each sample's first and count, each one's start and length."""
    low = pack.offsets[samples].astype(np.int64)
    counts = pack.offsets[samples + 1].astype(np.int64) - low
    first = np.cumsum(counts) - counts
    which = np.arange(counts.sum()) + np.repeat(low - first, counts)
    return first, counts, pack.starts[which].astype(np.int64), pack.lengths[which].astype(np.int64)
