"""The folder ``nonfinite`` of a run: a record of each step that was not finite."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

FOLDER = "nonfinite"
"""Its name, in ``checkpoints_path``."""
_NEEDED = ("step", "cursor", "left_out", "samples", "data", "loss", "parameter")


def write_record(run: Path, record: dict[str, Any]) -> Path:
    """Write a record next to the earlier ones of its step. Returns its path. Raises OSError.

    The first of step 5 is ``step-5.json``, the second ``step-5.1.json``: a run that went back, or
    was started again, may find more than one.
    """
    path = next(path for path in _names(run, record["step"]) if not path.exists())
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    return fresh.replace(path)


def read_record(path: Path) -> dict[str, Any]:
    """Read what ``write_record`` wrote. Raises ValueError where it is no record."""
    try:
        record = json.loads(path.read_text())
        missing = [key for key in _NEEDED if key not in record]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no record of a step: {error}") from error
    if missing:
        raise ValueError(f"{path} is no record of a step: {', '.join(missing)} is missing")
    return record


def record_at(run: Path, step: int, cursor: dict[str, int]) -> Path | None:
    """The newest record of a step whose batch begins at this place in the data; None: none does."""
    found = list(itertools.takewhile(Path.exists, _names(run, step)))
    return next((path for path in reversed(found) if _begins(path, cursor)), None)


def _names(run: Path, step: int) -> itertools.chain[Path]:
    """Names of records of a step, in order, without end."""
    more = (run / FOLDER / f"step-{step}.{number}.json" for number in itertools.count(1))
    return itertools.chain([run / FOLDER / f"step-{step}.json"], more)


def _begins(path: Path, cursor: dict[str, int]) -> bool:
    try:
        return read_record(path)["cursor"] == cursor
    except ValueError:
        return False
