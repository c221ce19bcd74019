"""Line charts and heat maps as SVG, for pages that need nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kenotron_train.log.numbers import short
from kenotron_train.report.curves import Points

COLOURS = ("#2a78b5", "#d9661f", "#2f9e5b", "#c23b5a", "#7d5fb2", "#8a6d3b", "#d072b0", "#607080")
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 30, 34
SHADES = 10
"""Shades of a heat map."""
MOST_NAMES = 16
"""Rows of a heat map whose names stand next to them."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    points: Points
    colour: str
    dashed: bool = False


def line_chart(title: str, x_title: str, lines: Sequence[Line], from_zero: bool = False) -> str:
    """An SVG picture of the curves on common axes; with a remark when there is nothing to draw.

    ``from_zero``: the axis of figures that are not negative begins at 0.
    """
    points = [point for line in lines for point in line.points]
    parts = [_text(LEFT, 18, title, "title")]
    if not points:
        parts.append(_text(WIDTH / 2, HEIGHT / 2, "no figures", "none"))
    else:
        x_low, x_high = _range([x for x, _ in points])
        y_low, y_high = _range([y for _, y in points] + [0.0] * from_zero)
        parts += _axes(x_title, (x_low, x_high), (y_low, y_high))
        parts += [_curve(line, (x_low, x_high), (y_low, y_high)) for line in lines if line.points]
    return _picture(title, parts)


def heat_map(title: str, x_title: str, rows: Sequence[tuple[str, Points]], low: float) -> str:
    """An SVG picture of one row of shades for each curve, from top to bottom.

    Args:
        title: stands above it, with what the darkest shade means.
        x_title: stands below it.
        rows: name and points of each, at least one point.
        low: the figure that has no shade, as have those below.
    """
    first, last = _range([x for _, points in rows for x, _ in points])
    xs = (first - (last - first) / max(1, max(len(p) for _, p in rows) - 1), last)
    high = max(low, *(y for _, points in rows for _, y in points))
    height = (HEIGHT - TOP - BOTTOM) / len(rows)
    every = -(-len(rows) // MOST_NAMES)
    parts = [_text(LEFT, 18, f"{title} ({short(low)}: no shade, {short(high)}: darkest)", "title")]
    for number, (name, points) in enumerate(rows):
        top = TOP + number * height
        if number % every == 0:
            parts.append(_text(LEFT - 6, top + height / 2 + 4, name, "y"))
        parts += _shades(name, points, (xs, low, high), (top, height))
    parts += [_text(_x(value, xs), HEIGHT - 16, short(value), "x") for value in ticks(*xs)]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, x_title, "x"))
    return _picture(title, parts)


def _shades(
    name: str,
    points: Points,
    scale: tuple[tuple[float, float], float, float],
    place: tuple[float, float],
) -> list[str]:
    """Rectangles of a row of a heat map; neighbours of one shade are one."""
    (xs, low, high), (top, height), found = scale, place, []
    start, step = _x(xs[0], xs), (high - low or 1.0) / SHADES
    for shade, group in groupby(points, lambda point: round(max(0.0, point[1] - low) / step)):
        same = list(group)
        stop = _x(same[-1][0], xs)
        said = f"{name}, to {short(same[-1][0])}: {short(max(y for _, y in same))}"
        found.append(
            f'<rect class="heat" x="{start:.1f}" y="{top:.1f}" width="{max(stop - start, 1):.1f}" '
            f'height="{height:.1f}" fill-opacity="{shade / SHADES:.1f}">'
            f"<title>{html.escape(said)}</title></rect>"
        )
        start = stop
    return found


def _picture(title: str, parts: Sequence[str]) -> str:
    body, label = "\n".join(parts), html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within [low, high], at most ``most``; 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, apart from one another."""
    low, high = min(values), max(values)
    if low == high:
        room = abs(low) / 2 or 1.0
        return low - room, high + room
    return low, high


def _place(value: float, ends: tuple[float, float], start: float, stop: float) -> float:
    low, high = ends
    return start + (value - low) / (high - low) * (stop - start)


def _x(value: float, ends: tuple[float, float]) -> float:
    return _place(value, ends, LEFT, WIDTH - RIGHT)


def _y(value: float, ends: tuple[float, float]) -> float:
    return _place(value, ends, HEIGHT - BOTTOM, TOP)


def _axes(x_title: str, xs: tuple[float, float], ys: tuple[float, float]) -> list[str]:
    found = []
    for value in ticks(*ys):
        y = _y(value, ys)
        found.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        found.append(_text(LEFT - 6, y + 4, short(value), "y"))
    found += [_text(_x(value, xs), HEIGHT - 16, short(value), "x") for value in ticks(*xs)]
    return [*found, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, x_title, "x")]


def _curve(line: Line, xs: tuple[float, float], ys: tuple[float, float]) -> str:
    places = [f"{_x(x, xs):.1f},{_y(y, ys):.1f}" for x, y in line.points]
    dash = ' stroke-dasharray="5 3"' if line.dashed else ""
    name = f"<title>{html.escape(line.name)}</title>"
    if len(places) == 1:
        x, y = places[0].split(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{line.colour}">{name}</circle>'
    points = " ".join(places)
    return (
        f'<polyline class="curve" stroke="{line.colour}"{dash} points="{points}">{name}</polyline>'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'
