"""A report of runs: one HTML file that needs no other, and the same pictures as a PNG."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from kenotron_command.charts import (
    COLOURS,
    Chart,
    Line,
    heat_map,
    line_chart,
    page_html,
    picture,
    write_png,
)
from kenotron_train.report.curves import EXPERT_PANELS, PANELS, Panel, ReportedRun, summary
from kenotron_train.report.evaluation_tables import evaluation_charts

AXES = {"step": "step", "tokens": "consumed_tokens"}
"""Quantities drawn along x, and the figure that has each."""
MOST_SHADES = 120
"""Points along x of a heat map."""


def colour_of(number: int) -> str:
    """The colour of the run of this number."""
    return COLOURS[number % len(COLOURS)]


def panel_lines(panel: Panel, runs: Sequence[ReportedRun], x: str) -> list[Line]:
    """The curves of a panel."""
    return [
        Line(f"{run.name}: {key}", run.points(key, AXES[x]), colour_of(i), dashed=place > 0)
        for i, run in enumerate(runs)
        for place, key in enumerate(panel.keys)
    ]


def panel_chart(panel: Panel, runs: Sequence[ReportedRun], x: str) -> Chart:
    """The chart of a panel."""
    return line_chart(panel.headline(runs), x, panel_lines(panel, runs, x), panel.from_zero)


def panels_of(runs: Sequence[ReportedRun]) -> tuple[Panel, ...]:
    """The panels of these runs; those of experts where any run has them."""
    return PANELS + (EXPERT_PANELS if any(run.expert_layers for run in runs) else ())


def expert_charts(runs: Sequence[ReportedRun], x: str) -> str:
    """A heat map of each run's layers, and a chart of each layer; nothing without experts."""
    layers = dict.fromkeys(layer for run in runs for layer in run.expert_layers)
    if not layers:
        return ""
    keys = {
        layer: (f"experts/{layer}/max_over_mean", f"experts/{layer}/entropy") for layer in layers
    }
    maps = []
    for run in runs:
        curves = [(n, run.points(keys[n][0], AXES[x], MOST_SHADES)) for n in run.expert_layers]
        if curves and all(points for _, points in curves):
            title = f"{run.name}: load max/mean"
            maps.append(picture(title, heat_map(title, x, curves, 1.0)))
    panels = [Panel(f"{n}: load max/mean (dashed: entropy)", keys[n]) for n in layers]
    charts = [
        picture(panel.title, line_chart(panel.title, x, panel_lines(panel, runs, x)))
        for panel in panels
    ]
    return (
        '<h2>Experts</h2>\n<div class="panels">\n' + "\n".join(maps) + "\n</div>\n"
        "<details><summary>Each layer</summary>\n"
        '<div class="panels">\n' + "\n".join(charts) + "\n</div>\n</details>\n"
    )


def report_html(runs: Sequence[ReportedRun], x: str = "step") -> str:
    """The whole page."""
    charts = [picture(p.headline(runs), panel_chart(p, runs, x)) for p in panels_of(runs)]
    body = (
        f"{_about(runs)}{_table(runs)}"
        '<div class="panels">\n'
        + "\n".join(charts)
        + f"\n</div>\n{evaluation_charts(runs, AXES[x])}{expert_charts(runs, x)}"
    )
    return page_html(", ".join(run.name for run in runs), body)


def _table(runs: Sequence[ReportedRun]) -> str:
    """A line for each figure, and a column for each run."""
    (_, *titles), *lines = summary(runs)
    rows = ["".join(f"<th>{_key(n)}{html.escape(name)}</th>" for n, (name, *_) in enumerate(lines))]
    rows[0] = f"<th></th>{rows[0]}"
    for title, *cells in zip(titles, *(line[1:] for line in lines), strict=True):
        rows.append("".join(f"<td>{html.escape(text)}</td>" for text in (title, *cells)))
    return "<table>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>\n"


def _about(runs: Sequence[ReportedRun]) -> str:
    """Write what is known of each run besides its figures, and its config to unfold."""
    return "".join(
        f"<p>{_key(n)}{html.escape(run.name)}: {html.escape(run.about.words)}</p>\n"
        f"<details><summary>Its config</summary><pre>{html.escape(run.about.config)}</pre>"
        "</details>\n"
        for n, run in enumerate(runs)
        if run.about.words
    )


def _key(number: int) -> str:
    return f'<span class="key" style="background:{colour_of(number)}"></span>'


def write_picture(path: Path, runs: Sequence[ReportedRun], x: str = "step") -> None:
    """Write the panels as a PNG. Raises OSError."""
    names = {run.name: colour_of(i) for i, run in enumerate(runs)}
    write_png(path, [panel_chart(panel, runs, x) for panel in panels_of(runs)], names)
