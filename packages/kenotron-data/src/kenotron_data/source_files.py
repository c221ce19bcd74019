"""Files that a path stands for: JSON lines, CSV, parquet, or text."""

import fnmatch
import os
import re
from collections.abc import Sequence
from pathlib import Path

from kenotron_data.csv_rows import CSV_SUFFIXES, CsvRows, is_csv
from kenotron_data.json_lines import JSON_SUFFIXES, JsonLines, is_json_lines
from kenotron_data.tables import ParquetRows
from kenotron_data.text import TEXT_SUFFIXES
from kenotron_data.text_pieces import TextFile, TextPiece

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the path of a file that say which split it belongs to."""


def file_pieces(
    path: str | os.PathLike[str],
    columns: Sequence[str] = ("text",),
    *,
    optional: Sequence[str] = (),
    split: str | None = None,
    glob_pattern: str | None = None,
) -> list[TextPiece]:
    """List the files of a path, as pieces that are not cut yet.

    Args:
        path: a file, or a folder that is read recursively, in the order of the files' paths: its
            tables (JSON lines, CSV and parquet), or if there is none, its text files. A file is
            taken for text unless its name says JSON lines (`.jsonl`, `.ndjson`, `.json`), a table
            (`.csv`, `.tsv`), each also with `.gz` or `.zst`, or `.parquet`. Hidden files are passed
            over.
        columns: columns that are read; a text file has one, whatever its name.
        optional: columns that are read where a table has them; None where it has not.
        split: of a folder of tables, take the files with a word of this split in
            their path below the folder; where no file has a word of any split, all are `train`.
            None takes all files.
        glob_pattern: of a folder, take the files whose path below it matches.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: a folder holds no such file, or the split has none.
    """
    root = Path(path)
    if root.is_file():
        _check_only_train(root, split)
        return [_piece(root, tuple(columns), tuple(optional))]
    if not root.exists():
        raise FileNotFoundError(f"no data at {str(root)!r}: give a file or a folder")
    files = sorted(_visible(root, glob_pattern))
    tables = [file for file in files if _is_table(file)]
    if tables:
        files = _of_split(root, tables, split) if split else tables
    else:
        _check_only_train(root, split)
        files = [f for f in files if glob_pattern or f.suffix.lower() in TEXT_SUFFIXES]
    if not files:
        raise ValueError(
            f"folder {str(root)!r} holds no data"
            + (f" that match {glob_pattern!r}" if glob_pattern else "")
            + f": files of JSON lines ({', '.join(JSON_SUFFIXES)}), tables "
            f"({', '.join((*CSV_SUFFIXES, '.parquet'))}) or text are read, "
            "hidden ones are not"
        )
    return [_piece(file, tuple(columns), tuple(optional)) for file in files]


def split_of(path: Path) -> str | None:
    """Return the split that the words of a relative path name; None if there is no such word."""
    words = re.split(r"[^a-z]+", path.as_posix().lower())
    for split, known in SPLIT_WORDS.items():
        if any(word in known for word in words):
            return split
    return None


def _is_table(file: Path) -> bool:
    return is_json_lines(file) or is_csv(file) or file.suffix == ".parquet"


def _piece(file: Path, columns: tuple[str, ...], optional: tuple[str, ...]) -> TextPiece:
    if is_json_lines(file):
        return JsonLines(path=file, columns=columns, optional=optional)
    if is_csv(file):
        return CsvRows(path=file, columns=columns, optional=optional)
    if file.suffix == ".parquet":
        return ParquetRows(path=file, columns=columns, optional=optional)
    return TextFile(path=file)


def _visible(root: Path, glob_pattern: str | None) -> list[Path]:
    """List the visible files below a folder whose path matches, if a pattern is given."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    if glob_pattern is None:
        return found
    return [f for f in found if fnmatch.fnmatch(f.relative_to(root).as_posix(), glob_pattern)]


def _of_split(root: Path, files: list[Path], split: str) -> list[Path]:
    named = {file: split_of(file.relative_to(root)) for file in files}
    if not any(named.values()):
        named = dict.fromkeys(files, "train")
    wanted = split_of(Path(split)) or split
    chosen = [file for file in files if named[file] == wanted]
    if not chosen:
        has = ", ".join(sorted({name for name in named.values() if name}))
        raise ValueError(f"folder {str(root)!r} has no split {split!r}; its files name: {has}")
    return chosen


def _check_only_train(root: Path, split: str | None) -> None:
    if split not in (None, "train"):
        raise ValueError(
            f"{str(root)!r} has no split {split!r}: one file, or a folder of text, is all 'train'"
        )
