"""A simulated schedule as a picture: a row for each rank, time to the right.

Colours say the kind (F blue, B and I green, W orange), lighter ones later chunks.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from kenotron_pp.simulate import Event, Trace

_COLOURS = {"F": (66, 120, 200), "B": (60, 150, 90), "I": (60, 150, 90), "W": (225, 140, 50)}
_UNIT, _ROW, _MARGIN, _CAPTION = 22, 24, 56, 26  # pixels of the SVG


def draw(trace: Trace, path: str | Path) -> None:
    """Write the schedule to ``path`` as ``.svg``, or ``.png`` (which needs the extra ``draw``).

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
    """The schedule for a terminal: a line for each rank, a column for each shortest action."""
    unit = _unit(trace)
    width = max(len(str(event.action)) for event in trace.timeline) + 1
    lines = []
    for rank in range(trace.ranks):
        line = f"{rank:>3} "
        for event in _of(trace, rank):
            first, end = (4 + width * round(at / unit) for at in (event.start, event.end))
            wide = max(end - first, width)
            fill = "-" if wide > width else " "
            line = line.ljust(first) + str(event.action).ljust(wide - 1, fill)
        lines.append(line)
    return "\n".join(lines)


def draw_svg(trace: Trace) -> str:
    """The schedule as the text of an SVG file."""
    scale = _UNIT / _unit(trace)
    width = _MARGIN + trace.ticks * scale + 12
    height = _CAPTION + trace.ranks * _ROW + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="17">{trace}</text>',
    ]
    for rank in range(trace.ranks):
        top = _CAPTION + rank * _ROW
        parts.append(f'<text x="8" y="{top + 16}">rank {rank}</text>')
        for event in _of(trace, rank):
            left, wide = _MARGIN + event.start * scale, (event.end - event.start) * scale
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{_ROW - 2}" '
                f'fill="rgb{_colour(event, trace.chunks)}" stroke="white"><title>{event.action}: '
                f'{event.start:g} to {event.end:g}</title></rect><text x="{left + wide / 2:.1f}" '
                f'y="{top + 15}" text-anchor="middle">{event.action.microbatch}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _draw_png(trace: Trace, file: Path) -> None:
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "drawing a PNG needs matplotlib: pip install 'kenotron-pp[draw]', or draw an .svg"
        ) from error
    size = (2 + trace.ticks / _unit(trace) * 0.22, 0.8 + trace.ranks * 0.3)
    figure = figure_module.Figure(figsize=size)
    axes = figure.subplots()
    for event in trace.timeline:
        colour = [channel / 255 for channel in _colour(event, trace.chunks)]
        wide = event.end - event.start
        axes.barh(event.rank, wide, 0.9, event.start, color=colour, edgecolor="white")
        middle = event.start + wide / 2
        axes.text(middle, event.rank, event.action.microbatch, ha="center", va="center", size=7)
    axes.set_yticks(range(trace.ranks), [f"rank {rank}" for rank in range(trace.ranks)])
    axes.invert_yaxis()
    axes.set_title(str(trace), fontsize=8)
    figure.savefig(file, bbox_inches="tight", dpi=150)


def _of(trace: Trace, rank: int) -> list[Event]:
    return [event for event in trace.timeline if event.rank == rank and event.end > event.start]


def _unit(trace: Trace) -> float:
    """The shortest action: it gets one column."""
    return min((e.end - e.start for e in trace.timeline if e.end > e.start), default=1)


def _colour(event: Event, chunks: int) -> tuple[int, ...]:
    red_green_blue = _COLOURS[event.action.kind]
    lighter = event.action.chunk / max(chunks, 2)
    return tuple(round(value + (255 - value) * lighter) for value in red_green_blue)
