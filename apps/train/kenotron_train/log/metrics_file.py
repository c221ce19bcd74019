"""``metrics.jsonl``: one JSON object a step, for as long as the run lives."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kenotron_train.log.line_writer import LineWriter
from kenotron_train.log.run_folder import writing

MOST_STEPS = 1 << 53
"""Steps from there on are none: whole numbers of JSON have no bound."""
BLOCK = 1 << 16
"""Bytes that are read at a time, from the end of the file."""


class MetricsFile:
    """Writes ``metrics.jsonl`` in a folder, line by line.

    A resumed run keeps the lines of steps before ``first_step``; what it does again is cut
    off, in place. A run that starts afresh leaves an earlier one's file under another name. While
    the file cannot be written, lines wait in memory, and ``complain`` is called once.

    Raises OSError naming the folder when the file cannot be opened at the start.
    """

    def __init__(
        self, folder: Path, first_step: int, complain: Callable[[str], None] = lambda _: None
    ) -> None:
        with writing(f"cannot write metrics.jsonl in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._path, self._complain = folder / "metrics.jsonl", complain
            self.aside = _set_aside(self._path) if first_step == 1 else None
            """Present path of an earlier run's file; None when there was none."""
            cut_journal(self._path, first_step)
        self._pending = self._path.with_suffix(".pending")
        self._complete(first_step - 1)
        self._lines = LineWriter(self._path, complain)

    def write(self, metrics: dict[str, Any]) -> None:
        """Add a line; it is with the operating system when this returns, or waits for it."""
        self._lines.write(json.dumps(metrics))

    def hold(self, metrics: dict[str, Any]) -> None:
        """Keep the line of a step that is about to be saved, in a file of its own.

        A run that dies between the save and the line resumes after the step: it then has its line.
        """
        with contextlib.suppress(OSError):
            self._pending.write_text(json.dumps(metrics) + "\n")

    def _complete(self, step: int) -> None:
        """Add the line of the step that a run resumes after, if it was saved and is missing."""
        with contextlib.suppress(OSError):
            text = self._pending.read_bytes()
            found = _parsed(text)
            if found is not None and found["step"] == step == last_step(self._path) + 1:
                with self._path.open("ab") as file:
                    file.write(text)

    def rewind(self, step: int) -> None:
        """Drop the lines of all steps after this one."""
        self._lines.close()
        try:
            cut_journal(self._path, step + 1)
        except OSError as error:
            self._complain(f"{self._path} keeps steps that were undone: {error}")
        self._lines = LineWriter(self._path, self._complain)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
        self._pending.unlink(missing_ok=True)


RECOVERY = "recovery"
"""Figure of the first step after the loss of a process: what the loss cost."""
RECOVERY_SECONDS = ("lost_s", "meeting_s", "loading_s")
"""Seconds in it: of steps that are made again, and of the new start."""


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl; lines that were cut off when a run died are left out."""
    with path.open("rb") as file:
        return [metrics for line in file if (metrics := _parsed(line)) is not None]


def last_step(path: Path) -> int:
    """The last step of a metrics.jsonl; 0 when there is none. Reads the end of the file only."""
    with path.open("rb") as file:
        return next((found["step"] for _, found in _backwards(file.fileno()) if found), 0)


def cut_journal(path: Path, first_step: int) -> None:
    """Make the file if need be, and cut it after its last line of a step before ``first_step``.

    Reads from the end, so that the time depends on what is cut off alone: steps ascend. A line that
    was cut off when a run died goes as well.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        kept = 0
        for end, metrics in _backwards(handle):
            if metrics is not None and metrics["step"] < first_step:
                kept = end
                break
        if kept != os.fstat(handle).st_size:
            os.ftruncate(handle, kept)
        if kept and os.pread(handle, 1, kept - 1) != b"\n":
            os.pwrite(handle, b"\n", kept)
    finally:
        os.close(handle)


def _backwards(handle: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each line of a file from the last one on: where it ends, and its step; None: it is none."""
    end = place = os.fstat(handle).st_size
    rest = b""
    while place > 0:
        size = min(BLOCK, place)
        place -= size
        lines = (os.pread(handle, size, place) + rest).split(b"\n")
        lines = [line + b"\n" for line in lines[:-1]] + [line for line in lines[-1:] if line]
        rest = lines.pop(0)  # its beginning may lie before this block
        for line in reversed(lines):
            yield end, _parsed(line)
            end -= len(line)
    if rest:
        yield end, _parsed(rest)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The metrics of a line; None when it is none, or was cut off."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_step = isinstance(metrics, dict) and type(metrics.get("step")) is int
    return metrics if is_step and abs(metrics["step"]) < MOST_STEPS else None


def _set_aside(path: Path) -> Path | None:
    """Rename a file that has steps to ``metrics.1.jsonl``, or the next number that is free."""
    if not path.exists() or not last_step(path):
        return None
    numbers = (path.with_suffix(f".{number}.jsonl") for number in itertools.count(1))
    return path.replace(next(name for name in numbers if not name.exists()))
