"""A report of runs: one HTML file that needs no other, and a PNG where matplotlib is installed."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kenotron_train.report.charts import COLOURS, Line, line_chart
from kenotron_train.report.curves import PANELS, Panel, Run, summary

AXES = {"step": "step", "tokens": "consumed_tokens"}
"""What is drawn along x, and the figure that has it."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .25rem .75rem; border-bottom: 1px solid #8885; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; font-size: 12px; fill: currentColor; }
.title { font-weight: 600; font-size: 14px; }
.x, .none { text-anchor: middle; } .y { text-anchor: end; }
.grid { stroke: #8883; fill: none; } .curve { fill: none; stroke-width: 1.6; }
.key { display: inline-block; width: 1em; height: .6em; margin-right: .4em; }
"""  # noqa: E501 (lines of CSS)


def colour_of(number: int) -> str:
    """The colour of the run of this number."""
    return COLOURS[number % len(COLOURS)]


def panel_lines(panel: Panel, runs: Sequence[Run], x: str) -> list[Line]:
    """The curves of a panel."""
    return [
        Line(f"{run.name}: {key}", run.points(key, AXES[x]), colour_of(i), dashed=place > 0)
        for i, run in enumerate(runs)
        for place, key in enumerate(panel.keys)
    ]


def report_html(runs: Sequence[Run], x: str = "step") -> str:
    """The whole page."""
    charts = [line_chart(panel.title, x, panel_lines(panel, runs, x)) for panel in PANELS]
    titles, *lines = summary(runs)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    rows = []
    for number, (name, *cells) in enumerate(lines):
        key = f'<span class="key" style="background:{colour_of(number)}"></span>'
        texts = [key + html.escape(name), *map(html.escape, cells)]
        rows.append("<tr>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>")
    title = html.escape(", ".join(run.name for run in runs))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<table>\n<tr>{head}</tr>\n" + "\n".join(rows) + "\n</table>\n"
        '<div class="panels">\n' + "\n".join(charts) + "\n</div>\n</body>\n</html>\n"
    )


def can_draw_png() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_png(path: Path, runs: Sequence[Run], x: str = "step") -> None:
    """The same four panels as a picture. Needs matplotlib; raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axes.set_title(panel.title, fontsize=11, loc="left")
        axes.set_xlabel(x)
        axes.grid(alpha=0.25)
        for line in panel_lines(panel, runs, x):
            if line.points:
                style, mark = "--" if line.dashed else "-", "o" if len(line.points) == 1 else None
                xs, ys = zip(*line.points, strict=True)
                axes.plot(xs, ys, color=line.colour, linestyle=style, marker=mark, linewidth=1.3)
    names = [run.name for run in runs]
    handles = [
        figure.axes[0].plot([], [], color=colour_of(i), label=name)[0]
        for i, name in enumerate(names)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    fresh = path.with_name(f"new.{path.name}")
    figure.savefig(fresh, dpi=110, format="png")
    fresh.replace(path)
