"""Results of an evaluation: for metrics.jsonl, trackers, the log, and a file of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kenotron_ckpt import replace_text
from kenotron_engine import Validation, perplexity

LARGEST = 1e300
"""Figures from there on, which no metric has, are left out: whole numbers of JSON have no bound."""
FOLDER = "evaluations"
"""In the folder of a run: a file of each step that a job, or a user, has evaluated."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation of one step; the same on every rank."""

    step: int
    """The step whose weights were evaluated."""
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of each task, by name; standard errors end with ``_stderr``."""
    losses: dict[str, float] = field(default_factory=dict)
    """Mean cross entropy of the held-out samples of each source, in nats a token."""
    seconds: float = 0.0
    """Duration of the evaluation."""
    failure: str = ""
    """Reason why there are no metrics of tasks; empty: there are, or none were asked for."""

    def to_metrics(self) -> dict[str, Any]:
        """Return the object that metrics.jsonl has, as JSON: nan and infinity are null."""
        found: dict[str, Any] = {"evaluated_step": self.step, "seconds": self.seconds}
        if self.tasks:
            found["tasks"] = _without_nan(self.tasks)
        if self.losses:
            each = {
                source: {"loss": loss, "perplexity": perplexity(loss)}
                for source, loss in self.losses.items()
            }
            found["sources"] = _without_nan(each)
        if self.failure:
            found["failure"] = self.failure
        return found

    def lines(self) -> list[str]:
        """Return a line for each task and each source."""
        found = []
        for task, metrics in self.tasks.items():
            parts = [
                f"{name} {value:.4g}" + _stderr(metrics, name)
                for name, value in metrics.items()
                if "_stderr" not in name
            ]
            found.append(f"{task}: {', '.join(parts)}")
        for source, loss in self.losses.items():
            found.append(f"{source}: loss {loss:.4g}, perplexity {perplexity(loss):.4g}")
        return found


def losses_of(validation: Validation | None) -> dict[str, float]:
    """Return the loss of each source of a validation; nothing where there is none."""
    return {} if validation is None else validation.sources


def write_evaluation(file: Path, found: Evaluation, **about: Any) -> None:
    """Write a file that a run, and its report, read; readers see the whole of it or nothing.

    ``about``: what else it says, as JSON. Raises OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps({**found.to_metrics(), **about}, indent=2) + "\n")


def read_evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the objects of files of a run by the evaluated step; what is none is passed over."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        if (read := read_evaluation(file)) is not None:
            found[read["evaluated_step"]] = read
    return found


def read_evaluation(file: Path) -> dict[str, Any] | None:
    """Return the object of one file; None where it cannot be read or is something else."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return checked_evaluation(read)


def checked_evaluation(read: object) -> dict[str, Any] | None:
    """Return the object of an evaluation with nothing in it but what one has; None: it is none.

    Files are written by others, too: figures that are no numbers are left out.
    """
    if not isinstance(read, dict) or type(read.get("evaluated_step")) is not int:
        return None
    found: dict[str, Any] = dict(read)
    for key in {"tasks", "sources"} & set(read):
        given = read[key]
        entries = given.items() if isinstance(given, dict) else ()
        found[key] = {
            name: {metric: value for metric, value in each.items() if _is_figure(value)}
            for name, each in entries
            if isinstance(each, dict)
        }
    return found


def _is_figure(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and abs(value) < LARGEST)


def _stderr(metrics: dict[str, float], name: str) -> str:
    first, slash, filtered = name.partition("/")
    value = metrics.get(f"{first}_stderr{slash}{filtered}")
    return "" if value is None else f" ± {value:.2g}"


def _without_nan(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """JSON has no nan and no infinity."""
    return {
        name: {key: value if abs(value) < float("inf") else None for key, value in each.items()}
        for name, each in values.items()
    }
