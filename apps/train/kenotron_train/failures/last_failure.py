"""The last failure of a run, so that one that comes again at the same step is noticed."""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path

from kenotron_ckpt import LOCK
from kenotron_command import TAKEN
from kenotron_dist import STALLED, first_cause
from kenotron_dist.launch import tell_launcher
from kenotron_train.failures.passing_errors import status_of
from kenotron_train.log.metrics_file import last_step

FILE = "failure.json"
"""In ``checkpoints_path``: the step, the cause, and how often it came in a row."""


def told(error: Exception, folder: str | None, before: str | None = None) -> str:
    """Record a failure and inform the launcher. Returns a message if it repeats the last one.

    ``folder`` is that of the run; None: it is not known. ``before``: see ``noted``.
    """
    cause = first_cause(error)
    passes = status_of(error) == STALLED
    said = noted(Path(folder), cause, before, passes=passes) if folder else ""
    tell_launcher("\n".join(filter(None, (cause, said))))
    return said


def latest_start(folder: Path) -> str | None:
    """Identity of the latest start in a run folder; None where there was none.

    Each start that takes the folder writes its name into the lock file; one that is refused does
    not.
    """
    try:
        status = (folder / LOCK).stat()
    except OSError:
        return None
    return f"{status.st_ino}.{status.st_mtime_ns}"


def noted(folder: Path, cause: str, before: str | None = None, *, passes: bool = False) -> str:
    """Write a failure down; a sentence when the last one was the same, else nothing.

    A run that had not begun leaves nothing: ``before`` is what ``latest_start`` was when it was
    started. Nor does one that was refused because another one, which may have begun since, holds
    the folder. ``passes``: the cause may pass. Ranks that fail together write the same. Never
    raises: the failure itself is what must be told.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        start = latest_start(folder)
        if start is None or start == before or TAKEN in cause:
            return ""
        step = last_step(folder / "metrics.jsonl") + 1
        path = folder / FILE
        last = json.loads(path.read_text()) if path.exists() else {}
        same = last.get("cause") == cause and last.get("step") == step
        # Of ranks that fail together the later ones find what the first has written.
        times = last["times"] if same else 0
        times += not (same and last.get("start") == start)
        known = {"step": step, "cause": cause, "times": times, "start": start}
        fresh = path.with_name(f"{FILE}.{uuid.uuid4().hex}")
        fresh.write_text(json.dumps(known) + "\n")
        fresh.replace(path)
        if times > 1:
            again = "will help once that has passed" if passes else "will not help"
            return (
                f"the run has now failed {times} times in a row at step {step}, always so: "
                f"starting it again {again}"
            )
    return ""
