"""Pieces of files or tables to tokenise: each is read alone, in the order of the source.

A piece yields rows: where the row is (a number that only the piece understands) and the values of
the columns that were asked for. A file is cut in pieces so that several processes can share it.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from kenotron_data.text import read_utf8

Row: TypeAlias = tuple[int, tuple[Any, ...]]
"""Place of a row, and the values of its columns."""


class TextPiece(Protocol):
    """Rows of a source that are read one after the other; it can be pickled."""

    @property
    def size(self) -> int:
        """Bytes of the rows, roughly; they share out the work."""
        ...

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order. ValueError names the file, the row and the rule."""
        ...

    def describe(self, place: int) -> str:
        """Name the file and the row at a place, for messages."""
        ...

    def identity(self) -> str:
        """Say which rows these are; another text once the data have changed."""
        ...

    def cut(self, size: int) -> "Sequence[TextPiece]":
        """Cut into pieces of about `size` bytes; a piece that cannot be cut comes back whole."""
        ...

    def count(self) -> int:
        """Return the number of rows."""
        ...

    def first(self, rows: int) -> "TextPiece":
        """Return the piece of the first `rows` rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """Columns of the rows of a file.

    Args:
        path: the file.
        columns: names whose values are read.
        optional: names whose values follow, None where a row has none.
        most: rows that are read at most; None: all.
    """

    path: Path
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A UTF-8 text file: one row with its text; none if it is empty."""

    path: Path
    rows: int = 1

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def __iter__(self) -> Iterator[Row]:
        """Yield the text."""
        text = read_utf8(self.path) if self.rows else ""
        if text:
            yield 0, (text,)

    def describe(self, place: int) -> str:
        """Name the file."""
        return repr(str(self.path))

    def identity(self) -> str:
        """Name the file, its size and its time."""
        return f"{file_identity(self.path)}:text:{self.rows}"

    def cut(self, size: int) -> "Sequence[TextFile]":
        """Return the file: a document is not cut."""
        return [self]

    def count(self) -> int:
        """Return 1, or 0 if the file is empty."""
        return sum(1 for _ in self)

    def first(self, rows: int) -> "TextFile":
        """Return the file, or nothing of it."""
        return replace(self, rows=min(self.rows, rows))


def file_identity(path: Path) -> str:
    """Name a file with its size in bytes and the time of its last change."""
    found = path.stat()
    return f"{os.path.abspath(path)}:{found.st_size}:{found.st_mtime_ns}"


def first_rows(pieces: Sequence[TextPiece], rows: int) -> list[TextPiece]:
    """Return the first rows of several pieces in order."""
    taken: list[TextPiece] = []
    for piece in pieces:
        if rows <= 0:
            break
        count = piece.count()
        taken.append(piece if count <= rows else piece.first(rows))
        rows -= count
    return taken


def grouped(pieces: Sequence[TextPiece], size: int) -> list[tuple[TextPiece, ...]]:
    """Cut pieces to about `size` bytes and put small neighbours together, in order."""
    groups: list[tuple[TextPiece, ...]] = []
    waiting: list[TextPiece] = []
    total = 0
    for piece in (small for whole in pieces for small in whole.cut(size)):
        own = piece.size
        if waiting and total + own > size:
            groups.append(tuple(waiting))
            waiting, total = [], 0
        waiting.append(piece)
        total += own
    if waiting:
        groups.append(tuple(waiting))
    return groups
