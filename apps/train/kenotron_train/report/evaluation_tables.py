"""Evaluations of runs, for a report: the last figures, and a chart of each."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron_command.charts import COLOURS, Line, Points, line_chart, picture
from kenotron_train.evaluate.results import FOLDER, checked_evaluation, read_evaluations
from kenotron_train.report.curves import ReportedRun


def with_evaluations(run: ReportedRun, folder: Path) -> ReportedRun:
    """Return a run whose steps have the figures of their evaluations, under ``evaluated``.

    Args:
        run: its steps; the line of a step may have what a job found of an earlier one.
        folder: of the run, with the files that jobs and users have left there. A figure of these
            replaces the same figure of the run.
    """
    found = {step: figures_of(each) for step, each in read_evaluations(folder / FOLDER).items()}
    for step in run.steps:
        if (each := checked_evaluation(step.get("evaluation"))) is not None:
            evaluated = each["evaluated_step"]
            found[evaluated] = figures_of(each) | found.get(evaluated, {})
    steps = [step | {"evaluated": found.get(step["step"], {})} for step in run.steps]
    return replace(run, steps=steps)


def figures_of(evaluation: dict[str, Any]) -> dict[str, float]:
    """Return the figures of an evaluation by what readers call them: ``arc_easy: acc``."""
    found = {}
    for name, metrics in (evaluation.get("tasks") or {}).items():
        found |= {f"{name}: {metric}": value for metric, value in metrics.items()}
    for name, metrics in (evaluation.get("sources") or {}).items():
        found[f"{name}: perplexity"] = metrics.get("perplexity")
    return {name: value for name, value in found.items() if value is not None}


def last_figures(runs: Sequence[ReportedRun]) -> list[list[str]]:
    """Return a table: a line of titles, then the last value of each figure in each run.

    Empty where no run has evaluations. Standard errors stand behind their figures.
    """
    last: list[dict[str, float]] = []
    for run in runs:
        last.append({})
        for step in run.steps:
            last[-1] |= step.get("evaluated", {})
    names = [
        name for name in dict.fromkeys(n for each in last for n in each) if not _is_error(name)
    ]
    lines = [[name, *(_shown(each, name) for each in last)] for name in names]
    return [["evaluation", *(run.name for run in runs)], *lines] if lines else []


def evaluation_charts(runs: Sequence[ReportedRun], x: str) -> str:
    """Return the part of a page: the table, and a chart of each figure; empty without any.

    ``x``: the figure of a step along x.
    """
    table = last_figures(runs)
    if not table:
        return ""
    rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table]
    lines = {
        name: [_line(run, name, x, place) for place, run in enumerate(runs)]
        for name, *_ in table[1:]
    }
    charts = [picture(name, line_chart(name, x, each)) for name, each in lines.items()]
    return (
        "<h2>Evaluations</h2>\n<table>\n"
        + "\n".join(f"<tr>{row}</tr>" for row in rows)
        + '\n</table>\n<details><summary>Each figure</summary>\n<div class="panels">\n'
        + "\n".join(charts)
        + "\n</div>\n</details>\n"
    )


def _line(run: ReportedRun, name: str, x: str, place: int) -> Line:
    points: Points = [
        (float(step[x]), float(step["evaluated"][name]))
        for step in run.steps
        if name in step.get("evaluated", {}) and x in step
    ]
    return Line(run.name, points, COLOURS[place % len(COLOURS)])


def _is_error(name: str) -> bool:
    return "_stderr" in name.rpartition(": ")[2]


def _shown(figures: dict[str, float], name: str) -> str:
    if name not in figures:
        return "-"
    task, colon, metric = name.rpartition(": ")
    first, slash, filtered = metric.partition("/")
    error = figures.get(f"{task}{colon}{first}_stderr{slash}{filtered}")
    return f"{figures[name]:.4g}" + ("" if error is None else f" ± {error:.2g}")
