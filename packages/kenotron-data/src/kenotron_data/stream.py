"""Any source of tokens as one stream: an array, a file, or the files of a folder in order.

N: tokens of the stream, R: windows that are read together, W: tokens of a window.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kenotron_data.row_samples import Int64Array, segments
from kenotron_data.token_file import TokenFile
from kenotron_data.token_folder import TokenFolder, keep_few

TokenSource: TypeAlias = NDArray[np.integer] | TokenFile | TokenFolder | Sequence[TokenFile]


class TokenStream:
    """Read windows of a stream at any places, many at once.

    Args:
        source: (N,) ids in memory or memory-mapped, a token file, a folder, or files in order.

    Raises:
        ValueError: an array that is not (N,) integers.
    """

    def __init__(self, source: TokenSource) -> None:
        if isinstance(source, np.ndarray):
            check_stream(source)
            self.files: tuple[TokenFile, ...] = ()
            self._parts: Sequence[NDArray[np.integer] | TokenFile] = (source,)
        else:
            self._parts = self.files = _files(source)
            keep_few(self.files)
        lengths = np.array([len(part) for part in self._parts], dtype=np.int64)
        self._dtype = np.result_type(*{part.dtype for part in self._parts})
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(lengths)])

    def __reduce__(self) -> tuple[type["TokenStream"], tuple[TokenSource]]:
        """Let a copy in another process map the files itself."""
        return TokenStream, (self.files or self._parts[0],)

    def __len__(self) -> int:
        """Return N."""
        return int(self.offsets[-1])

    def describe(self, place: int) -> str:
        """Name the file and the document that hold the token at a place."""
        if not self.files:
            return f"tokens from place {place}"
        part = self._part(place)
        file, local = self.files[part], place - int(self.offsets[part])
        return f"{file}, document {file.document_at(local)}, token {local}"

    def windows(self, starts: Int64Array, width: int) -> NDArray[np.integer]:
        """Return the W = `width` tokens from each of (R,) places on: (R, W).

        Windows may continue from one file into the next; the caller keeps them inside the stream.
        """
        if len(self._parts) == 1:
            return _windows(self._array(0), starts, width)
        out = np.empty((len(starts), width), dtype=self._dtype)
        for part, rows in self._whole(starts, width):
            out[rows] = _windows(self._array(part), starts[rows] - self.offsets[part], width)
        for row, part, local, column, count in self._crossing(starts, width):
            out[row, column : column + count] = self._array(part)[local : local + count]
        return out

    def documents(
        self, starts: Int64Array, width: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the document of each token of the windows, and its place in it: both (R, W).

        Documents are counted from 0 in each window, and so are the tokens that it has of them. A
        file begins a document. ValueError where an index is corrupt; the file is named.
        """
        begins = [np.arange(len(starts), dtype=np.int64) * width]
        for part, rows in self._whole(starts, width):
            begins.append(self._begins(part, rows * width, starts[rows], width))
        for row, part, local, column, count in self._crossing(starts, width):
            place = np.array([row * width + column], dtype=np.int64)
            start = np.array([local], dtype=np.int64) + self.offsets[part]
            begins += [place, self._begins(part, place, start, count)]
        return segments(np.unique(np.concatenate(begins)), (len(starts), width))

    def _array(self, part: int) -> NDArray[np.integer]:
        """Return the tokens of a file, or of the array."""
        found = self._parts[part]
        return found.tokens if isinstance(found, TokenFile) else found

    def _part(self, place: int) -> int:
        return int(np.searchsorted(self.offsets, place, side="right")) - 1

    def _whole(self, starts: Int64Array, width: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield each file with the rows whose window lies in it."""
        parts = np.searchsorted(self.offsets, starts, side="right") - 1
        inside = starts + width <= self.offsets[parts + 1]
        for part in np.unique(parts[inside]).tolist():
            yield part, np.flatnonzero((parts == part) & inside)

    def _crossing(self, starts: Int64Array, width: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the pieces of other windows: row, file, place in the file, column, count."""
        ends = self.offsets[np.searchsorted(self.offsets, starts, side="right")]
        for row in np.flatnonzero(starts + width > ends).tolist():
            column, part = 0, self._part(int(starts[row]))
            while column < width:
                local = int(starts[row]) + column - int(self.offsets[part])
                count = min(width - column, len(self._parts[part]) - local)
                yield row, part, local, column, count
                column, part = column + count, part + 1

    def _begins(self, part: int, bases: Int64Array, starts: Int64Array, width: int) -> Int64Array:
        """Return `bases` plus the places after 0 where a document begins in windows of a file."""
        ends = self.files[part].ends if self.files else None
        if ends is None:
            return bases[:0]
        local = starts - self.offsets[part]
        # Keys of the index's own type: others would turn the whole index into float64.
        keys = local.astype(np.uint64)
        low = np.searchsorted(ends, keys, side="right")
        high = np.searchsorted(ends, keys + np.uint64(width - 1), side="right")
        counts = np.maximum(high - low, 0)
        before = np.cumsum(counts) - counts
        which = np.arange(counts.sum()) + np.repeat(low - before, counts)
        places = ends[which].astype(np.int64) - np.repeat(local, counts)
        descends = np.diff(places) < 0
        descends[before[1:][(before[1:] > 0) & (before[1:] < len(places))] - 1] = False  # new row
        outside = (places <= 0) | (places >= width)
        if (high < low).any() or outside.any() or descends.any():
            raise ValueError(
                f"{self.files[part]}: its index is corrupt: the ends of documents do not ascend"
            )
        return np.repeat(bases, counts) + places


def _files(source: TokenFile | TokenFolder | Sequence[TokenFile]) -> tuple[TokenFile, ...]:
    if isinstance(source, TokenFile):
        return (source,)
    return source.files if isinstance(source, TokenFolder) else tuple(source)


def check_stream(tokens: NDArray[np.integer]) -> None:
    """Refuse what is no stream of tokens with a ValueError."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"a stream of tokens has one dimension of integers, but {tokens.dtype} of shape "
            f"{tokens.shape} was given"
        )


def _windows(array: NDArray[np.integer], starts: Int64Array, width: int) -> NDArray[np.integer]:
    """Copy windows of one array, all in one call."""
    step = array.strides[0]
    if len(starts) == 0:
        return np.empty((0, width), dtype=array.dtype)
    if not (0 <= starts.min() and starts.max() + width <= len(array)):
        raise IndexError(f"windows of {width} tokens do not all lie in {len(array)} tokens")
    shape, strides = (len(array) - width + 1, width), (step, step)
    if array.flags.c_contiguous:  # this makes the view at a third of the cost
        view = np.ndarray(shape, array.dtype, array, strides=strides)  # type: ignore[arg-type]
    else:
        view = np.lib.stride_tricks.as_strided(array, shape, strides, writeable=False)
    return view[starts]
