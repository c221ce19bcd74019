"""A simulated schedule as a picture: a row for each rank, time to the right.

Colours say the kind (F blue, B and I green, W orange), lighter ones later chunks. Time is to scale
as long as actions are of similar lengths. Else short ones are drawn longer and long waits shorter,
so that the width of the picture is bounded by the number of actions, whatever their times; what
ends together still ends at the same place on all ranks.
"""

from __future__ import annotations

import importlib
import math
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from kenotron_pp.simulate import Event, Trace

_COLOURS = {"F": (66, 120, 200), "B": (60, 150, 90), "I": (60, 150, 90), "W": (225, 140, 50)}
_UNIT, _ROW, _MARGIN, _CAPTION, _LETTER = 22, 24, 56, 26, 6.5  # pixels of the SVG
_MOST = 6  # columns of a longest action, and of a longest time in which nothing begins or ends
_DPI, _WIDEST, _AREA = 150, 200.0, 2200.0  # a PNG: most inches, and square inches (200 MB)


def draw(trace: Trace, path: str | Path) -> None:
    """Write the schedule to ``path`` as ``.svg``, or ``.png`` (which needs the extra ``draw``).

    A PNG has at most about 30,000 pixels a side: what would be larger is squeezed, and its boxes
    have no numbers.

    Raises ValueError for another suffix and ImportError when matplotlib is missing for PNG.
    """
    file = Path(path)
    if file.suffix == ".svg":
        file.write_text(draw_svg(trace), encoding="utf-8")
    elif file.suffix == ".png":
        _draw_png(trace, file)
    else:
        raise ValueError(f"cannot draw to {file.name}: the name must end in .svg or .png")


def draw_text(trace: Trace) -> str:
    """The schedule for a terminal: a line for each rank, a column for each shortest action.

    Lines below say what the picture does not show: when it is not to scale, and which actions are
    left out because they take no time.
    """
    axis = _axis(trace)
    width = max((len(str(event.action)) for event in trace.timeline), default=1) + 1
    margin = max(4, len(str(trace.ranks)) + 1)
    lines = []
    for rank in range(trace.ranks):
        line = f"{rank:>{margin - 1}} "
        for event in _of(trace, rank):
            first, end = (margin + width * axis.column(at) for at in (event.start, event.end))
            fill = "-" if end - first > width else " "
            line = line.ljust(first) + str(event.action).ljust(end - first - 1, fill)
        lines.append(line.rstrip())
    return "\n".join([*lines, *axis.notes])


def draw_svg(trace: Trace) -> str:
    """The schedule as the text of an SVG file. Titles of its boxes say the true times."""
    axis = _axis(trace)
    caption = "; ".join([str(trace), *axis.notes])
    width = max(_MARGIN + axis.end * _UNIT + 12, 16 + _LETTER * len(caption))
    height = _CAPTION + trace.ranks * _ROW + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="17">{caption}</text>',
    ]
    for rank in range(trace.ranks):
        top = _CAPTION + rank * _ROW
        parts.append(f'<text x="8" y="{top + 16}">rank {rank}</text>')
        for event in _of(trace, rank):
            left, right = (_MARGIN + axis.at[at] * _UNIT for at in (event.start, event.end))
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{_ROW - 2}" '
                f'fill="rgb{_colour(event, trace.chunks)}" stroke="white"><title>{event.action}: '
                f"{event.start:g} to {event.end:g}</title></rect>"
                f'<text x="{(left + right) / 2:.1f}" y="{top + 15}" text-anchor="middle">'
                f"{event.action.microbatch}</text>"
            )
    return "\n".join([*parts, "</svg>", ""])


def _draw_png(trace: Trace, file: Path) -> None:
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "drawing a PNG needs matplotlib: pip install matplotlib, or draw an .svg"
        ) from error
    axis = _axis(trace)
    wide = 2 + axis.end * 0.22
    title = textwrap.wrap(
        "; ".join([str(trace), *axis.notes]), min(max(60, 12 * round(wide)), 2000)
    )
    high = 0.8 + trace.ranks * 0.3 + (len(title) - 1) * 0.15
    width = min(wide, _WIDEST)
    height = min(high, _WIDEST, _AREA / width)
    figure = figure_module.Figure(figsize=(width, height))
    axes = figure.subplots()
    for rank in range(trace.ranks):
        for event in _of(trace, rank):
            colour = [channel / 255 for channel in _colour(event, trace.chunks)]
            start, end = axis.at[event.start], axis.at[event.end]
            axes.barh(rank, end - start, 0.9, start, color=colour, edgecolor="white")
            if (width, height) == (wide, high):
                label = event.action.microbatch
                axes.text((start + end) / 2, rank, label, ha="center", va="center", size=7)
    axes.set_yticks(range(trace.ranks), [f"rank {rank}" for rank in range(trace.ranks)])
    axes.invert_yaxis()
    if axis.unit is None:
        axes.set_xticks([])
    else:
        axes.xaxis.set_major_formatter(lambda column, _: f"{column * axis.unit:g}")
    axes.set_title("\n".join(title), fontsize=8)
    figure.savefig(file, bbox_inches="tight", dpi=_DPI)


def _of(trace: Trace, rank: int) -> list[Event]:
    return [event for event in trace.timeline if event.rank == rank and event.end > event.start]


@dataclass(frozen=True)
class _TimeAxis:
    """Positions at which moments are drawn, in columns of the shortest action."""

    at: dict[float, float]
    """By the time at which an action starts or ends."""
    end: float
    unit: float | None
    """Time of a column; None when the picture is not to scale."""
    notes: list[str]
    """Actions that the picture does not show."""

    def column(self, time: float) -> int:
        """The whole column that is nearest: one for each action at least."""
        return math.floor(self.at[time] + 0.5 + 1e-9)  # halves go up, whatever their last bit


def _axis(trace: Trace) -> _TimeAxis:
    drawn = [event for event in trace.timeline if event.end > event.start]
    lengths = [event.end - event.start for event in drawn]
    shortest, longest = min(lengths, default=1.0), max(lengths, default=1.0)
    unit = max(shortest, longest / _MOST)
    begun: dict[float, set[float]] = defaultdict(set)  # by the end of an action: its start
    for event in drawn:
        begun[event.end].add(event.start)
    at: dict[float, float] = {}
    before = x = widest = 0.0
    for time in sorted({*begun, *(event.start for event in drawn)}):
        wait = (time - before) / unit
        ends = [at[start] + 1 for start in begun.get(time, ())]
        x = at[time] = max([x + min(wait, _MOST), *ends])
        before, widest = time, max(widest, wait)
    notes = []
    to_scale = max(unit / shortest, widest / _MOST) < 1.001  # up to rounding
    if not to_scale:
        notes.append("not to scale: short actions are drawn longer, long waits shorter")
    empty = Counter(event.action.kind for event in trace.timeline if event.end <= event.start)
    if empty:
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(empty.items()))
        notes.append(f"not drawn, for they take no time: {counted}")
    return _TimeAxis(at, x, unit if to_scale else None, notes)


def _colour(event: Event, chunks: int) -> tuple[int, ...]:
    red_green_blue = _COLOURS[event.action.kind]
    lighter = event.action.chunk / max(chunks, 2)
    return tuple(round(value + (255 - value) * lighter) for value in red_green_blue)
