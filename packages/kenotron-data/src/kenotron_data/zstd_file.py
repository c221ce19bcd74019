"""Read files compressed with zstd: all frames of a file, and no truncated one taken for whole."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_BLOCK = 1 << 17
_PIECE = 1 << 10
"""Compressed bytes that are decompressed together: they become 32 MiB at most."""
_WINDOW = 1 << 27
"""Bytes of memory that a frame may ask for."""


def open_zstd(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed.

    Reading raises ValueError where the file is corrupt or truncated.

    Raises:
        ImportError: `zstandard` is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} is compressed with zstd: install zstandard, or kenotron-data[hub]"
        ) from error
    return io.BufferedReader(_Raw(path, zstandard), buffer_size=1 << 20)


class _Raw(io.RawIOBase):
    """The decompressed bytes; zstandard's own reader ends quietly where a file is truncated."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._file = path.open("rb")
        self._blocks = _decompressed(self._file, path, zstandard)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompressed(file: IO[bytes], path: Path, zstandard: Any) -> Iterator[bytes]:
    """Yield the blocks of all frames."""
    frame = None
    while data := file.read(_BLOCK):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            piece, data = data[:_PIECE], data[_PIECE:]
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise ValueError(f"{str(path)!r}: the zstd file is corrupt ({error})") from error
            if frame.eof:
                data, frame = frame.unused_data + data, None
    if frame is not None:
        raise ValueError(f"{str(path)!r}: the zstd file is truncated: its last frame has no end")
