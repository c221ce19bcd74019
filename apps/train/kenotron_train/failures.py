"""The last failure of a run, so that one that comes again at the same step is noticed."""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path

FILE = "failure.json"
"""In ``checkpoints_path``: the step, the cause, and how often it came in a row."""


def noted(folder: Path, cause: str) -> str:
    """Write a failure down; a sentence when the last one was the same, else nothing.

    A run that had not begun leaves nothing. Ranks that fail together write the same. Never raises:
    the failure itself is what must be told.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        metrics = folder / "metrics.jsonl"
        if not metrics.exists():
            return ""
        step = _last_step(metrics) + 1
        path = folder / FILE
        before = json.loads(path.read_text()) if path.exists() else {}
        same = before.get("cause") == cause and before.get("step") == step
        # Of ranks that fail together the later ones find what the first has written.
        times = before["times"] if same else 0
        times += not (same and _is_of_this_start(before, metrics))
        known = {"step": step, "cause": cause, "times": times, "start": _start(metrics)}
        fresh = path.with_name(f"{FILE}.{uuid.uuid4().hex}")
        fresh.write_text(json.dumps(known) + "\n")
        fresh.replace(path)
        if times > 1:
            return (
                f"the run has now failed {times} times in a row at step {step}, always so: "
                "starting it again will not help"
            )
    return ""


def _is_of_this_start(before: dict, metrics: Path) -> bool:
    return before.get("start") == _start(metrics)


def _start(metrics: Path) -> int:
    """Tells starts of a run apart: each makes a metrics file of its own."""
    return metrics.stat().st_ino


def _last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines()
    return json.loads(lines[-1])["step"] if lines else 0
