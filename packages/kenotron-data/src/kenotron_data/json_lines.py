"""Rows of JSON lines: stretches of a file, or a file that is compressed with gzip or zstd."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from kenotron_data.text_pieces import FileRows, Row, file_identity
from kenotron_data.zstd_file import open_zstd

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Files of JSON lines; `.gz`, `.zst` or `.zstd` may follow."""
_GZIP, _ZSTD = (".gz",), (".zst", ".zstd")
_MARK = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
LONGEST_LINE = 256 << 20
"""Bytes of a line; a longer one is refused before it is read."""


@dataclass(frozen=True, kw_only=True)
class JsonLines(FileRows):
    """The lines that begin in bytes [start, stop) of a file; empty lines are passed over.

    The file is compressed where its name ends in `.gz`, `.zst` or `.zstd`.

    Args:
        start: first byte.
        stop: byte after the last; None: the end of the file.
    """

    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the lines, compressed where the file is."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start

    def __iter__(self) -> Iterator[Row]:
        """Yield the place of a line in bytes, and the values. ValueError names the line."""
        for place, line in self._lines():
            yield place, self._values(place, line)

    def describe(self, place: int) -> str:
        """Name the file and the line, counted from 1."""
        lines = 1
        with closing(opened(self.path)) as file:
            while place > 0 and (block := file.read(min(_BLOCK, place))):
                lines += block.count(b"\n")
                place -= len(block)
        return f"{str(self.path)!r}, line {lines}"

    def identity(self) -> str:
        """Name the file, its size and its time, the bytes and the columns."""
        where = f"{self.start}-{self.stop}:{self.most}"
        return f"{file_identity(self.path)}:json:{where}:{','.join(self.columns)}"

    def cut(self, size: int) -> "Sequence[JsonLines]":
        """Cut in stretches of bytes; a compressed or limited file stays whole."""
        end = self.start + self.size
        if self.path.suffix in (*_GZIP, *_ZSTD) or self.most is not None or self.size <= size:
            return [self]
        bounds = [*range(self.start, end, size), end]
        return [
            replace(self, start=start, stop=stop)
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ]

    def count(self) -> int:
        """Return the number of lines that are not empty."""
        return sum(1 for _ in self._lines())

    def first(self, rows: int) -> "JsonLines":
        """Return the piece of the first `rows` rows."""
        return replace(self, most=rows if self.most is None else min(rows, self.most))

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines with their places."""
        left = -1 if self.most is None else self.most
        try:
            with closing(opened(self.path)) as file:
                place = self.start
                if self.start:  # the line that holds the byte before belongs to another piece
                    file.seek(self.start - 1)
                    place += len(self._line(file, self.start - 1)) - 1
                while left and (self.stop is None or place < self.stop):
                    line = self._line(file, place)
                    if not line:
                        return
                    text = line.removeprefix(_MARK) if place == 0 else line
                    if not text.isspace() and text:
                        left -= 1
                        yield place, text
                    place += len(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{str(self.path)!r}: the gzip file is corrupt ({error})") from error

    def _line(self, file: IO[bytes], place: int) -> bytes:
        line = file.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"{self.describe(place)}: the line has more than {LONGEST_LINE} bytes: split the "
                "document, or write its rows on lines of their own"
            )
        return line

    def _values(self, place: int, line: bytes) -> tuple[Any, ...]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.describe(place)}: this is no JSON ({error}); each line must be one JSON "
                "object"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{self.describe(place)}: this is a JSON {type(row).__name__}; each line must be "
                'one JSON object, such as {"text": "..."}'
            )
        try:
            values = [row[column] for column in self.columns]
        except KeyError as error:
            raise ValueError(
                f"{self.describe(place)}: there is no column {error}; the line has "
                f"{', '.join(map(repr, row)) or 'none'}"
            ) from None
        return (*values, *map(row.get, self.optional))


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed.

    Raises:
        ImportError: the file is compressed with zstd and `zstandard` is not installed.
    """
    if path.suffix in _GZIP:
        return io.BufferedReader(gzip.open(path, "rb"), buffer_size=_BLOCK)
    if path.suffix not in _ZSTD:
        return path.open("rb")
    return open_zstd(path)


def is_json_lines(path: Path) -> bool:
    """Say whether a file's name is one of JSON lines, compressed or not."""
    name = path.with_suffix("") if path.suffix in (*_GZIP, *_ZSTD) else path
    return name.suffix.lower() in JSON_SUFFIXES
