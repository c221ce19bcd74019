"""Rows of tables: parquet files, and data sets of Hugging Face that lie on this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kenotron_data.text_pieces import FileRows, Row, file_identity

_ROWS = 512
"""Rows that are read together."""


@dataclass(frozen=True, kw_only=True)
class ParquetRows(FileRows):
    """Row groups [start, stop) of a parquet file.

    Args:
        start: first row group.
        stop: row group after the last; None: all that follow.
    """

    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the columns, uncompressed."""
        return sum(size for _, size in self._groups())

    def __iter__(self) -> Iterator[Row]:
        """Yield the number of a row in the file, and the values."""
        with _opened(self.path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in self.columns if name not in names]:
                raise ValueError(
                    f"{str(self.path)!r}: there is no column {missing[0]!r}; the file has "
                    f"{', '.join(map(repr, names))}"
                )
            read = (*self.columns, *(name for name in self.optional if name in names))
            metadata = file.metadata
            place = sum(metadata.row_group(i).num_rows for i in range(self.start))
            left = metadata.num_rows if self.most is None else self.most
            groups = list(range(metadata.num_row_groups)[self.start : self.stop])
            for table in _batches(file, self.path, groups, read):
                values = {name: table.column(name).to_pylist() for name in read}
                for row in _table_rows(values, (*self.columns, *self.optional), table.num_rows):
                    if not left:
                        return
                    left -= 1
                    yield place, row
                    place += 1

    def describe(self, place: int) -> str:
        """Name the file and the row, counted from 0."""
        return f"{str(self.path)!r}, row {place}"

    def identity(self) -> str:
        """Name the file, its size and its time, the rows and the columns."""
        where = f"{self.start}-{self.stop}:{self.most}"
        return f"{file_identity(self.path)}:parquet:{where}:{','.join(self.columns)}"

    def cut(self, size: int) -> "Sequence[ParquetRows]":
        """Cut between row groups; a limited piece stays whole."""
        if self.most is not None:
            return [self]
        pieces: list[ParquetRows] = []
        start, total = self.start, 0
        groups = self._groups()
        for group, (_, own) in enumerate(groups, self.start):
            if group > start and total + own > size:
                pieces.append(replace(self, start=start, stop=group))
                start, total = group, 0
            total += own
        return [*pieces, replace(self, start=start, stop=self.start + len(groups))]

    def count(self) -> int:
        """Return the number of rows."""
        rows = sum(rows for rows, _ in self._groups())
        return rows if self.most is None else min(rows, self.most)

    def first(self, rows: int) -> "ParquetRows":
        """Return the piece of the first `rows` rows."""
        return replace(self, most=rows if self.most is None else min(rows, self.most))

    def _groups(self) -> list[tuple[int, int]]:
        """Return rows and bytes of each row group."""
        with _opened(self.path) as file:
            found = file.metadata
            return [
                (found.row_group(i).num_rows, _group_size(found.row_group(i), self.columns))
                for i in range(found.num_row_groups)[self.start : self.stop]
            ]


@dataclass(frozen=True, kw_only=True)
class DatasetRows:
    """Rows [start, stop) of a `datasets.Dataset`.

    Args:
        dataset: the data set; it is not a streaming one.
        name: what messages call it.
        columns: columns whose values are read.
        optional: columns whose values follow, None where there is none.
        start: first row.
        stop: row after the last; None: the end.
    """

    dataset: Any
    name: str
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the rows, all columns."""
        rows = self.dataset.data.num_rows  # of the table, before a selection
        return round(self.count() * self.dataset.data.nbytes / max(1, rows))

    def __iter__(self) -> Iterator[Row]:
        """Yield the number of a row, and the values."""
        names = self.dataset.column_names
        if missing := [name for name in self.columns if name not in names]:
            raise ValueError(
                f"{self.name}: there is no column {missing[0]!r}; the data set has "
                f"{', '.join(map(repr, names))}"
            )
        read = [*self.columns, *(name for name in self.optional if name in names)]
        chosen = self.dataset.select_columns(read).with_format(None)
        for start in range(self.start, self.start + self.count(), _ROWS):
            stop = min(start + _ROWS, self.start + self.count())
            batch = chosen[start:stop]
            values = {name: batch[name] for name in read}
            rows = _table_rows(values, (*self.columns, *self.optional), stop - start)
            yield from enumerate(rows, start)

    def describe(self, place: int) -> str:
        """Name the data set and the row, counted from 0."""
        return f"{self.name}, row {place}"

    def identity(self) -> str:
        """Give the data set's own fingerprint, the rows and the columns."""
        where = f"{self.start}-{self.start + self.count()}"
        return f"{self.dataset._fingerprint}:rows:{where}:{','.join(self.columns)}"

    def cut(self, size: int) -> "Sequence[DatasetRows]":
        """Cut between rows."""
        step = max(1, size * self.count() // max(1, self.size))
        bounds = [*range(self.start, self.start + self.count(), step), self.start + self.count()]
        return [
            replace(self, start=start, stop=stop)
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ]

    def count(self) -> int:
        """Return the number of rows."""
        return (len(self.dataset) if self.stop is None else self.stop) - self.start

    def first(self, rows: int) -> "DatasetRows":
        """Return the piece of the first `rows` rows."""
        return replace(self, stop=self.start + min(rows, self.count()))


def _table_rows(
    values: dict[str, list[Any]], columns: Sequence[str], count: int
) -> Iterator[tuple[Any, ...]]:
    """Yield `count` rows: None in a column without values, and no nulls in structs."""
    missing = [None] * count
    found = (values.get(name, missing) for name in columns)
    return zip(*(map(_without_nulls, each) for each in found), strict=True)


def _without_nulls(value: Any) -> Any:
    """Leave out the null fields of structs: a table gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(own) for key, own in value.items() if own is not None}
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value


def _opened(path: Path) -> Any:
    """Open a parquet file; ImportError without pyarrow, ValueError where it is none."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} is a parquet file: install pyarrow, or kenotron-data[hub]"
        ) from error
    try:
        return ParquetFile(path)
    except (ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{str(path)!r}: this is no parquet file ({error})") from error


def _batches(file: Any, path: Path, groups: list[int], columns: tuple[str, ...]) -> Iterator[Any]:
    from pyarrow import ArrowException

    try:
        yield from file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=list(columns))
    except (ArrowException, OSError) as error:
        raise ValueError(f"{str(path)!r}: the parquet file is corrupt ({error})") from error


def _group_size(group: Any, columns: tuple[str, ...]) -> int:
    """Return the bytes of some columns of a row group."""
    parts = [group.column(i) for i in range(group.num_columns)]
    return sum(
        p.total_uncompressed_size for p in parts if p.path_in_schema.split(".")[0] in columns
    )
