"""``metrics.jsonl``: one JSON object a step, for as long as the run lives."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, TextIO

from kenotron_train.run_folder import writing


class Journal:
    """Writes ``metrics.jsonl`` in a folder, line by line.

    A run that goes on keeps the lines of steps before ``first_step``; what it does again is
    dropped. A run that starts afresh leaves an earlier one's file under another name.

    Raises OSError naming the folder when it cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        with writing(f"cannot write metrics.jsonl in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / "metrics.jsonl"
            self.aside = _set_aside(self._path) if first_step == 1 else None
            """Where the file of an earlier run is now; None when there was none."""
            self._file = _continue(self._path, first_step)

    def write(self, metrics: dict[str, Any]) -> None:
        """Add a line; it is with the operating system when this returns."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drop the lines of all steps after this one."""
        self._file.close()
        self._file = _continue(self._path, step + 1)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl; lines that were cut off when a run died are left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            metrics = json.loads(line)
        except ValueError:
            continue
        if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
            found.append(metrics)
    return found


def _set_aside(path: Path) -> Path | None:
    """Rename a file that has steps to ``metrics.1.jsonl``, or the next number that is free."""
    if not path.exists() or not read_journal(path):
        return None
    numbers = (path.with_suffix(f".{number}.jsonl") for number in itertools.count(1))
    return path.replace(next(name for name in numbers if not name.exists()))


def _continue(path: Path, first_step: int) -> TextIO:
    """Open the file; keep only steps before ``first_step``."""
    earlier = read_journal(path) if path.exists() and first_step > 1 else []
    fresh = path.with_suffix(".new")  # renamed into place: a kill here loses nothing
    file = fresh.open("w", encoding="utf-8")
    file.writelines(json.dumps(step) + "\n" for step in earlier if step["step"] < first_step)
    file.flush()
    fresh.replace(path)
    return file
