"""Line charts and heat maps of matplotlib, as SVG inside a page and as one picture; the page."""

from __future__ import annotations

import html
import importlib.util
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron_command.figures import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLOURS",
    "WITHOUT_MATPLOTLIB",
    "Chart",
    "Line",
    "Points",
    "can_draw",
    "heat_map",
    "line_chart",
    "page_html",
    "picture",
    "write_png",
]
COLOURS = ("#2a78b5", "#d9661f", "#2f9e5b", "#c23b5a", "#7d5fb2", "#8a6d3b", "#d072b0", "#607080")
"""Of curves, one after the other."""
SIZE = 5.0, 2.9
"""Inches of a chart in a page, where 72 units of the SVG are an inch."""
SHADE, SHADES = "#c23b5a", 10
"""Colour of a heat map, and how many shades of it."""
WIDEST = 48
"""Characters of a line of a title."""
MOST_NAMES = 16
"""Rows of a heat map whose names stand next to them."""
INK = "#010203"
"""Stands for the colour of the page's text, which is light on dark pages."""
WITHOUT_MATPLOTLIB = "pictures need matplotlib, which is not installed: pip install matplotlib"
"""Message where pictures cannot be drawn."""
Points = list[tuple[float, float]]
"""Of a curve, x first."""
Chart = Callable[["Axes"], None]
"""Draws on axes."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .25rem .75rem; border-bottom: 1px solid #8885; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 1rem; margin: 1rem 0; }
svg { width: 100%; height: auto; } summary { cursor: pointer; margin: 1rem 0; }
.key { display: inline-block; width: 1em; height: .6em; margin-right: .4em; }
"""  # noqa: E501 (lines of CSS)


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    points: Points
    colour: str
    dashed: bool = False


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def line_chart(title: str, x_title: str, lines: Sequence[Line], from_zero: bool = False) -> Chart:
    """Return a chart of curves on common axes; with a remark when there is nothing to draw.

    ``from_zero``: the axis of figures that are not negative begins at 0.
    """

    def draw(axes: Axes) -> None:
        _titles(axes, title, x_title)
        axes.grid(alpha=0.2)
        for line in lines:
            if line.points:
                style, mark = "--" if line.dashed else "-", "o" if len(line.points) == 1 else ""
                xs, ys = zip(*line.points, strict=True)
                (drawn,) = axes.plot(xs, ys, style, color=line.colour, marker=mark, linewidth=1.6)
                drawn.set_gid(f"curve: {line.name}")
        if not any(line.points for line in lines):
            axes.text(0.5, 0.5, "no figures", transform=axes.transAxes, ha="center")
            axes.set(xticks=[], yticks=[])
        elif from_zero:
            axes.set_ylim(bottom=0)

    return draw


def heat_map(title: str, x_title: str, rows: Sequence[tuple[str, Points]], low: float) -> Chart:
    """Return a chart of one row of shades for each curve, from top to bottom.

    Args:
        title: stands above it, with what the darkest shade means.
        x_title: stands below it.
        rows: name and points of each, at least one point.
        low: the figure that has no shade, as have those below.
    """
    # A shade spans from the point before to its own; the first begins one usual distance earlier.
    ends = [x for _, points in rows for x, _ in points]
    most = max(len(points) for _, points in rows)
    first = min(ends) - ((max(ends) - min(ends)) / (most - 1) if max(ends) > min(ends) else 1)
    high = max(low, *(y for _, points in rows for _, y in points))
    every = -(-len(rows) // MOST_NAMES)

    def draw(axes: Axes) -> None:
        _titles(axes, f"{title} ({short(low)}: no shade, {short(high)}: darkest)", x_title)
        for number, (name, points) in enumerate(rows):
            _shade(axes, (name, number), points, (first, low, high))
        names = {number: name for number, (name, _) in enumerate(rows) if number % every == 0}
        axes.set(xlim=(first, max(ends)), ylim=(len(rows), 0))
        axes.set_yticks([number + 0.5 for number in names], list(names.values()))

    return draw


def _shade(
    axes: Axes, row: tuple[str, int], points: Points, scale: tuple[float, float, float]
) -> None:
    """Draw a row of a heat map; neighbours of one shade are one rectangle."""
    from matplotlib.patches import Rectangle

    (name, number), (start, low, high) = row, scale
    step = (high - low or 1.0) / SHADES
    for shade, group in groupby(points, lambda point: round(max(0.0, point[1] - low) / step)):
        same = list(group)
        stop = same[-1][0]
        drawn = Rectangle((start, number), stop - start, 1, color=SHADE, alpha=shade / SHADES, lw=0)
        drawn.set_gid(f"shade: {name}, to {short(stop)}: {short(max(y for _, y in same))}")
        axes.add_patch(drawn)
        start = stop


def _titles(axes: Axes, title: str, x_title: str) -> None:
    axes.set_title(textwrap.fill(title, WIDEST), loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x_title)
    axes.spines[["top", "right"]].set_visible(False)


def _style() -> AbstractContextManager[None]:
    """Ink for all that is no curve, and text that stays text."""
    import matplotlib

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    rules = dict.fromkeys((*inked, "grid.color"), INK) | {"font.family": "sans-serif"}
    rules |= {"font.size": 10, "svg.fonttype": "none", "text.parse_math": False}
    return matplotlib.rc_context(rules | {"svg.hashsalt": "kenotron", "figure.dpi": 72})


def picture(title: str, chart: Chart) -> str:
    """Return a chart as SVG for the middle of a page, in the ink of the page.

    Its curves and shades show their names under the mouse.
    """
    from matplotlib.figure import Figure

    written = io.StringIO()
    with _style():
        figure = Figure(figsize=SIZE, layout="constrained")
        chart(figure.subplots())
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    # Leave out what is of a file only, show names as tooltips, and take the colour of the page.
    for part in (r"\A.*?(?=<svg)", "<metadata>.*?</metadata>", "<style.*?</style>"):
        text = re.sub(part, "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<g id="(curve|shade): (.*?)">', r'<g class="\1"><title>\2</title>', text)
    text = re.sub(r'<g id="[^"]*">', "<g>", text).replace(INK, "currentColor")
    box = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{html.escape(title)}"'
    return re.sub(
        r"<svg.*?>", f'{head} xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1,
        flags=re.DOTALL,
    )  # fmt: skip


def write_png(path: Path, charts: Sequence[Chart], names: dict[str, str]) -> None:
    """Write charts as one picture, two in a line.

    Args:
        path: of the picture, replaced when it is whole.
        charts: at least one.
        names: the colour of each name of the legend.

    Raises OSError.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = -(-len(charts) // 2)
    figure = Figure(figsize=(12, 3.75 * rows), layout="constrained")
    places = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes, chart in zip(places, charts, strict=False):
        chart(axes)
    for axes in places[len(charts) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    fresh = path.with_name(f"new.{path.name}")
    figure.savefig(fresh, dpi=110, format="png")
    fresh.replace(path)


def page_html(title: str, body: str) -> str:
    """Return a page with a title, in the light or dark colours of its reader."""
    title = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{body}</body>\n</html>\n"
    )
