"""Documents that share a sample: best-fit packing, computed once and kept next to the tokens.

The longest document is placed first, each in the sample where it leaves the least room (best-fit
decreasing). Nothing is cut but documents longer than a sample. W = S + 1 tokens of a sample.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kenotron_data.row_samples import Int64Array
from kenotron_data.token_file import TokenFile, UInt64Array, map_integers

_MAGIC = int.from_bytes(b"KENOPACK", "little")
_VERSION = 1
_HEADER = 7
"""uint64 words: magic, version, S, tokens, documents, samples, pieces."""


@dataclass(frozen=True, eq=False)
class PackIndex:
    """The samples that documents of a file are packed in.

    Args:
        offsets: (samples + 1,) first piece of each sample, and the number of pieces.
        starts: (pieces,) place in the file where a piece of a document begins.
        lengths: (pieces,) tokens of a piece.
    """

    offsets: UInt64Array
    starts: UInt64Array
    lengths: UInt64Array

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets) - 1


def cut_documents(ends: Int64Array, sequence_length: int) -> tuple[Int64Array, Int64Array]:
    """Cut the documents that are longer than a sample, in pieces of W that overlap by one token.

    Every token but a document's first is the label of one piece. Empty documents have no piece.

    Args:
        ends: (documents,) where each document ends.
        sequence_length: S.

    Returns:
        (pieces,) where each begins, and how long it is: 1 to W tokens.
    """
    begins = np.concatenate([[0], ends[:-1]])
    lengths = ends - begins
    counts = np.where(lengths > 1, -(-(lengths - 1) // sequence_length), lengths)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + number * sequence_length
    return starts, np.minimum(np.repeat(ends, counts) - starts, sequence_length + 1)


def best_fit(lengths: Int64Array, capacity: int) -> Int64Array:
    """Place pieces in bins by best-fit decreasing.

    Pieces of one length are placed together, which gives the bins that one after the other would.

    Args:
        lengths: (pieces,) from 1 to `capacity`.
        capacity: what a bin holds.

    Returns:
        (pieces,) int64 number of the bin of each, from 0.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    bounds = [*firsts.tolist(), len(order)]
    placed = np.empty(len(lengths), dtype=np.int64)
    room = _Room(capacity)
    for number, size in enumerate((-sizes).tolist()):
        first, stop = bounds[number], bounds[number + 1]
        while first < stop:
            left, per_bin = room.tightest(size), room.tightest(size) // size
            bins = room.take(left, -(-(stop - first) // per_bin))
            count = min(stop - first, per_bin * len(bins))
            placed[order[first : first + count]] = np.repeat(bins, per_bin)[:count]
            full, rest = divmod(count, per_bin)
            room.give(left - per_bin * size, bins[:full])
            room.give(left - rest * size, bins[full:])
            first += count
    return placed


class _Room:
    """The bins that are open, by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bins = capacity, 0
        self._waiting: dict[int, list[Int64Array]] = {}
        self._rooms = 0  # bit r is set where a bin with room r waits

    def tightest(self, size: int) -> int:
        """Return the least room of an open bin that holds `size`; that of a new bin if none."""
        fitting = self._rooms >> size
        return size + (fitting & -fitting).bit_length() - 1 if fitting else self.capacity

    def take(self, left: int, count: int) -> Int64Array:
        """Take at most `count` bins with room `left`, new ones if none waits."""
        waiting = self._waiting.get(left)
        if not waiting:
            self.bins += count
            return np.arange(self.bins - count, self.bins)
        bins = waiting.pop()
        if len(bins) > count:
            waiting.append(bins[count:])
        if not waiting:
            self._rooms ^= 1 << left
        return bins[:count]

    def give(self, left: int, bins: Int64Array) -> None:
        """Put bins back, with the room that is left in them now."""
        if left and len(bins):
            self._waiting.setdefault(left, []).append(bins)
            self._rooms |= 1 << left


def pack_path(file: TokenFile, sequence_length: int) -> Path:
    """Return where the pack index of a file lies for one sequence length."""
    return file.path.with_name(f"{file.path.name}.pack{sequence_length}")


def write_pack_index(file: TokenFile, sequence_length: int) -> Path:
    """Pack the documents of a file and keep the result next to it.

    Memory and time grow with the number of documents: some 60 bytes and 1 us for each.

    Args:
        file: tokens with an index of documents.
        sequence_length: S.

    Returns:
        The file that was written; one that was there is replaced.

    Raises:
        ValueError: the file has no index of documents or a corrupt one, or S is not positive.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, but {sequence_length} was given")
    if file.ends is None:
        raise ValueError(f"{file}: the file has no index of its documents: nothing can be packed")
    file.verify()
    starts, lengths = cut_documents(file.ends.astype(np.int64), sequence_length)
    bins = best_fit(lengths, sequence_length + 1)
    order = np.argsort(bins, kind="stable")  # in a sample documents keep their order
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bins))])
    head = [_MAGIC, _VERSION, sequence_length, len(file), file.documents]
    head += [len(offsets) - 1, len(starts)]
    path = pack_path(file, sequence_length)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as handle:
        for words in (np.array(head, dtype=np.uint64), offsets, starts[order], lengths[order]):
            handle.write(words.astype("<u8").data)
        handle.flush()
        os.fsync(handle.fileno())
    partial.replace(path)
    return path


def read_pack_index(file: TokenFile, sequence_length: int) -> PackIndex:
    """Map the pack index of a file.

    Raises:
        FileNotFoundError: there is none for this sequence length.
        ValueError: it is truncated, or was made for another file of tokens.
    """
    path = pack_path(file, sequence_length)
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path)!r}: {file} was not packed for sequence_length {sequence_length}: call "
            "write_pack_index() once, when the tokens are made"
        )
    size = path.stat().st_size
    words = map_integers(path, 8, size // 8)
    if len(words) < _HEADER or [int(word) for word in words[:2]] != [_MAGIC, _VERSION]:
        raise ValueError(f"{str(path)!r}: this is no pack index, or a truncated one")
    made_for, found = [int(word) for word in words[2:5]], [len(file), file.documents]
    if made_for != [sequence_length, *found]:
        raise ValueError(
            f"{str(path)!r}: the index packs {made_for[1]} tokens in {made_for[2]} documents for "
            f"sequence_length {made_for[0]}, but {file} has {found[0]} in {found[1]}: make it again"
        )
    samples, pieces = int(words[5]), int(words[6])
    if size != 8 * (_HEADER + samples + 1 + 2 * pieces):
        raise ValueError(f"{str(path)!r}: {size} bytes are not what its header says: truncated")
    offsets, starts, lengths = np.split(words[_HEADER:], [samples + 1, samples + 1 + pieces])
    return PackIndex(offsets, starts, lengths)
