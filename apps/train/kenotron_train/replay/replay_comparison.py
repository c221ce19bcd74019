"""Comparison of a replayed step with the first one: bit for bit, or within a tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron_train.failures.nonfinite_folder import read_record, record_at
from kenotron_train.log.metrics_file import read_journal

LOSS_TOLERANCE = 1e-3
"""Relative, for losses of accelerators. Attention's backward adds with atomics, in any order: after
an update parameters differ in bits, and a rounding of bfloat16 is 4e-3 of an element; a loss is a
mean over many."""
NORM_TOLERANCE = 1e-2
"""Relative, for norms of the gradient, which amplify such differences."""


@dataclass(frozen=True)
class Comparison:
    """Tolerances in the comparison of a replay with the run."""

    loss: float
    """Largest relative deviation; 0: bit for bit."""
    norm: float
    """The same for the norm of the gradient."""
    reason: str

    def __str__(self) -> str:
        if not self.loss:
            return f"compared bit for bit: {self.reason}"
        return f"compared within {self.loss:g} (loss) and {self.norm:g} (norm): {self.reason}"


def comparison(device: str, deterministic: bool) -> Comparison:
    """Choose how to compare a run on ``device`` (``cpu``, ``cuda``). Pure."""
    if device == "cpu":
        return Comparison(0.0, 0.0, "the run is on CPUs")
    if deterministic:
        return Comparison(0.0, 0.0, "general.deterministic is true")
    return Comparison(
        LOSS_TOLERANCE,
        NORM_TOLERANCE,
        f"on {device} two runs of a step differ in their last bits; general.deterministic: true, "
        "in the run and in the replay, makes them equal",
    )


def compared(found: dict[str, Any], run: Path, how: Comparison) -> list[str]:
    """Return what is as the run had it, and what is not: lines of the log.

    A step that was not finite is compared with its record, another one with ``metrics.jsonl``.

    Args:
        found: what the replay found, see ``replay``.
        run: folder of the run.
        how: see ``comparison``.
    """
    record = record_at(run, found["step"], found["cursor"])
    if record is not None:
        return _lines(*_with_record(found, read_record(record), how), str(record), how)
    metrics = _metrics(run, found["step"])
    if metrics is None:
        return []
    return _lines(*_with_metrics(found, metrics, how), str(run / "metrics.jsonl"), how)


def _lines(same: list[str], other: list[str], where: str, how: Comparison) -> list[str]:
    lines = [f"as in {where}: {', '.join(same)}"] if same else []
    if other:
        about = "Are config, flags and layout those of the run?"
        lines.append(f"not as in {where}: {', '.join(other)}. {about}")
    return [*lines, str(how)]


def _with_record(
    found: dict[str, Any], before: dict[str, Any], how: Comparison
) -> tuple[list[str], list[str]]:
    same, other = [], []
    equal = all(before[key] == found[key] for key in ("samples", "data"))
    (same if equal else other).append("samples")
    for key, tolerance in (("loss", how.loss), ("parameter", 0.0)):
        if before[key] == found[key] or (tolerance and _near(found[key], before[key], tolerance)):
            same.append(key)
        else:
            other.append(f"{key} {found[key]} instead of {before[key]}")
    return same, other


def _with_metrics(
    found: dict[str, Any], before: dict[str, Any], how: Comparison
) -> tuple[list[str], list[str]]:
    same, other = [], []
    for key, name, tolerance in (
        ("loss", "lm_loss", how.loss),
        ("grad_norm", "grad_norm", how.norm),
    ):
        if before.get(name) is None:
            continue
        if _near(found[key], before[name], tolerance):
            same.append(key)
        else:
            other.append(f"{key} {found[key]} instead of {before[name]}")
    return same, other


def _near(found: str, before: str | float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most ``tolerance``, as a share of the earlier one."""
    new, old = float(found), float(before)
    if not (math.isfinite(new) and math.isfinite(old)):
        return str(new) == str(old)
    return abs(new - old) <= tolerance * abs(old)


def _metrics(run: Path, step: int) -> dict[str, Any] | None:
    """The line of a step in ``metrics.jsonl``; None where there is none."""
    path = run / "metrics.jsonl"
    lines = read_journal(path) if path.exists() else []
    return next((line for line in reversed(lines) if line["step"] == step), None)
