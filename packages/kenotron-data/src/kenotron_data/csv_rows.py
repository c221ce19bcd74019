"""Rows of tables of text: comma-separated (`.csv`) or tab-separated (`.tsv`) values."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from kenotron_data.json_lines import LONGEST_LINE, opened
from kenotron_data.text_pieces import FileRows, Row, file_identity

CSV_SUFFIXES = (".csv", ".tsv")
"""Files of tables of text; `.gz`, `.zst` or `.zstd` may follow."""
_COMPRESSED = (".gz", ".zst", ".zstd")


@dataclass(frozen=True, kw_only=True)
class CsvRows(FileRows):
    """The rows of a table, in UTF-8, whose first line names its columns.

    Values are texts, as they stand in the file; a quoted one may hold line ends. A piece is not
    cut, because only a reader from the beginning knows which line ends are quoted. The file is
    compressed where its name ends in `.gz`, `.zst` or `.zstd`.
    """

    @property
    def size(self) -> int:
        """Bytes of the file, compressed where it is."""
        return self.path.stat().st_size

    def __iter__(self) -> Iterator[Row]:
        """Yield the line in which a row ends, and the values. ValueError names the line."""
        left = -1 if self.most is None else self.most
        rows = self._records()
        _, header = next(rows, (0, []))
        if missing := [name for name in self.columns if name not in header]:
            raise ValueError(
                f"{str(self.path)!r}: there is no column {missing[0]!r}; its first line names "
                f"{', '.join(map(repr, header)) or 'none'}"
                + "; text_column_name chooses one"
                * (len(self.columns) == 1)
            )
        if twice := [n for n in (*self.columns, *self.optional) if header.count(n) > 1]:
            raise ValueError(f"{str(self.path)!r}: its first line names {twice[0]!r} twice")
        found = [header.index(name) for name in self.columns]
        more = [header.index(name) if name in header else None for name in self.optional]
        for line, row in rows:
            if not left:
                return
            if len(row) != len(header):
                raise ValueError(
                    f"{self.describe(line)}: this row has {len(row)} values, the first line "
                    f"{len(header)}: quote values that hold a separator or a line end"
                )
            left -= 1
            yield line, (*(row[i] for i in found), *(None if i is None else row[i] for i in more))

    def describe(self, place: int) -> str:
        """Name the file and the line, counted from 1."""
        return f"{str(self.path)!r}, line {place}"

    def identity(self) -> str:
        """Name the file, its size and its time, and the columns."""
        return f"{file_identity(self.path)}:csv:{self.most}:{','.join(self.columns)}"

    def cut(self, size: int) -> "Sequence[CsvRows]":
        """Return the table: it is not cut."""
        return [self]

    def count(self) -> int:
        """Return the number of rows."""
        return sum(1 for _ in self)

    def first(self, rows: int) -> "CsvRows":
        """Return the piece of the first `rows` rows."""
        return replace(self, most=rows if self.most is None else min(rows, self.most))

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the records that are not empty, with the lines in which they end."""
        csv.field_size_limit(LONGEST_LINE)  # of the process; 128 KiB, which documents exceed
        name = _plain_name(self.path)
        try:
            with (
                closing(opened(self.path)) as file,
                io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
            ):
                separator = "\t" if name.suffix.lower() == ".tsv" else ","
                reader = csv.reader(text, delimiter=separator, strict=True)
                for row in reader:
                    if row:
                        yield reader.line_num, row
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{str(self.path)!r}: the gzip file is corrupt ({error})") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(self.path)!r} is not UTF-8 text ({error.reason})") from error
        except csv.Error as error:
            raise ValueError(f"{str(self.path)!r}: this is no table ({error})") from error


def is_csv(path: Path) -> bool:
    """Say whether a file's name is one of a table of text, compressed or not."""
    return _plain_name(path).suffix.lower() in CSV_SUFFIXES


def _plain_name(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in _COMPRESSED else path
