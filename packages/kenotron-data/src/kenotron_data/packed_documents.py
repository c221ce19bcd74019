"""Samples of whole documents, as a pack index put them together. W = S + 1 tokens of a sample."""

import numpy as np

from kenotron_data.best_fit import PackIndex, read_pack_index
from kenotron_data.pack import check_index, check_indices
from kenotron_data.row_samples import PAD, Int64Array, Rows, segments
from kenotron_data.token_file import TokenFile
from kenotron_data.token_folder import TokenFolder


class PackedDocuments:
    """Samples that hold whole documents, padded at the end; padding has no label.

    Only documents longer than a sample are cut. `write_pack_index` writes once for each file which
    documents share a sample; positions start again at 0 with each of them.

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

        `rows` marks the places that are padding.
        """
        check_index(i, len(self))
        return self.rows(np.array([i], dtype=np.int64)).tokens[0].astype(np.int64)

    def rows(self, indices: Int64Array) -> Rows:
        """Read samples together; IndexError where there is none."""
        check_indices(indices, len(self))
        width = self.sequence_length + 1
        kind = np.result_type(*{file.dtype for file in self.files})
        tokens = np.zeros((len(indices), width), dtype=kind)
        used = np.zeros(len(indices), dtype=np.int64)
        begins: list[Int64Array] = []
        of = np.searchsorted(self._first, indices, side="right") - 1
        for number in np.unique(of).tolist():
            rows = np.flatnonzero(of == number)
            samples = indices[rows] - self._first[number]
            used[rows], places = self._fill(number, samples, rows * width, tokens)
            begins.append(places)
        ends = np.arange(len(indices)) * width + used
        padding = ends[used < width]
        joined = np.sort(np.concatenate([*begins, padding]))
        documents, places = segments(joined, tokens.shape, padding)
        if not self.separate_documents:
            real = documents != PAD
            documents[real], places = 0, np.where(real, np.arange(width, dtype=np.int32), places)
        return Rows(tokens, documents, places=places)

    def describe(self, i: int) -> str:
        """Name the file of sample `i`, and its first document."""
        number = int(np.searchsorted(self._first, i, side="right")) - 1
        file, pack = self.files[number], self._packs[number]
        start = int(pack.starts[int(pack.offsets[i - int(self._first[number])])])
        return f"{file}, document {file.document_at(start)} and what is packed with it"

    def _fill(
        self, number: int, samples: Int64Array, bases: Int64Array, tokens: np.ndarray
    ) -> tuple[Int64Array, Int64Array]:
        """Copy the pieces of samples of one file; row i begins at bases[i] of the flat tokens.

        Returns:
            Tokens that each sample has, and where its pieces begin in the flat tokens.
        """
        file, pack = self.files[number], self._packs[number]
        first, counts, starts, lengths = _pieces(pack, samples)
        used = np.add.reduceat(lengths, first)
        if int((starts + lengths).max()) > len(file) or int(used.max()) > tokens.shape[1]:
            raise ValueError(f"{file}: its pack index is corrupt: a piece lies outside the tokens")
        before = np.cumsum(lengths) - lengths
        places = before + np.repeat(bases - before[first], counts)
        flat, read = tokens.reshape(-1), file.tokens
        # Slices beat one gather over all tokens from some 100 tokens a document on.
        for start, length, place in zip(
            starts.tolist(), lengths.tolist(), places.tolist(), strict=True
        ):
            flat[place : place + length] = read[start : start + length]
        return used, places


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
