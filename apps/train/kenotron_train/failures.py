"""The last failure of a run, so that one that comes again at the same step is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from kenotron_dist import first_cause, tell_launcher
from kenotron_train.config import Config

FILE = "failure.json"
"""In ``checkpoints_path``: the step, the cause, and how often it came in a row."""


def told(error: Exception, config: Config | None, before: os.stat_result | None = None) -> str:
    """Note a failure and tell the launcher; a sentence when it is the last one once more."""
    cause = first_cause(error)
    said = noted(Path(config.checkpoints.checkpoints_path), cause, before) if config else ""
    tell_launcher("\n".join(filter(None, (cause, said))))
    return said


@contextlib.contextmanager
def latest_start(folder: Path) -> Iterator[os.stat_result | None]:
    """Around a start: what tells the one before from it; None where there was none.

    Each makes a metrics file of its own. While that of the one before is open, no other can get
    its number.
    """
    with contextlib.ExitStack() as held:
        found = None
        with contextlib.suppress(OSError):
            file = held.enter_context((folder / "metrics.jsonl").open("rb"))
            found = os.fstat(file.fileno())
        yield found


def noted(folder: Path, cause: str, before: os.stat_result | None = None) -> str:
    """Write a failure down; a sentence when the last one was the same, else nothing.

    A run that had not begun leaves nothing: ``before`` is what ``latest_start`` was when it was
    started. Ranks that fail together write the same. Never raises: the failure itself is what must
    be told.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        metrics = folder / "metrics.jsonl"
        status = metrics.stat()
        if before is not None and os.path.samestat(status, before):
            return ""
        step = _last_step(metrics) + 1
        path = folder / FILE
        last = json.loads(path.read_text()) if path.exists() else {}
        same = last.get("cause") == cause and last.get("step") == step
        # Of ranks that fail together the later ones find what the first has written.
        times = last["times"] if same else 0
        start = f"{status.st_ino}.{status.st_mtime_ns}"
        times += not (same and last.get("start") == start)
        known = {"step": step, "cause": cause, "times": times, "start": start}
        fresh = path.with_name(f"{FILE}.{uuid.uuid4().hex}")
        fresh.write_text(json.dumps(known) + "\n")
        fresh.replace(path)
        if times > 1:
            return (
                f"the run has now failed {times} times in a row at step {step}, always so: "
                "starting it again will not help"
            )
    return ""


def _last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines()
    return json.loads(lines[-1])["step"] if lines else 0
