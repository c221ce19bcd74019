"""Memory of the ranks of a pipeline over the time of a step, and a page that draws it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from kenotron_ckpt import replace_text
from kenotron_command.charts import COLOURS, Line, Points, line_chart, page_html, picture
from kenotron_cost import Estimate, Planner, instants

GB = 1e9
SHOWN = 4
"""Ranks of the pipeline that a page draws at most."""


def memory_curve(planner: Planner, estimate: Estimate, rank: int) -> Points:
    """Return seconds and gigabytes of a rank of pp in a step, as ``peak_memory`` counts them.

    A forward adds what it keeps evenly; a backward has its own on top from its start to its end.
    """
    plan, again = estimate.plan, estimate.again
    forward, backward, idle = instants(plan, planner.measured, again, rank, planner.machine)
    schedule, pp = plan.parallelism.schedule, plan.parallelism.pp
    live = planner.measured.live(schedule, pp, plan.microbatches)[rank]
    one = forward.get("activations", 0) / max(1, live)
    own = sum(idle.values())
    ends, working = (
        sum(each.values()) - each.get("activations", 0) - own for each in (forward, backward)
    )
    alive, found = 0, [(0.0, own / GB)]

    def note(second: float, more: float = 0.0) -> None:
        found.append((second, (own + alive * one + more) / GB))

    for event in planner.timed.events(plan, again, rank):
        note(event.start)
        if event.action.kind == "F":
            alive += 1
            note(event.end, ends if event.action.chunk == schedule.chunks - 1 else 0.0)
        elif event.action.kind in ("B", "I"):
            note(event.start, working)
            note(event.end, working)
            alive -= 1
            note(event.end)
    note(estimate.time.seconds)
    return found


def shown_ranks(pp: int, fullest: int) -> list[int]:
    """Return the ranks of a pipeline that are drawn: the fullest, both ends, one between."""
    return sorted({fullest, 0, pp // 2, pp - 1})[:SHOWN]


def write_page(
    target: Path, planner: Planner, estimate: Estimate, lines: Sequence[str], title: str
) -> None:
    """Write an HTML file that needs no other: a plan's lines, and its memory over a step.

    Args:
        target: the file, replaced when it is whole.
        planner: of the model.
        estimate: the layout that is drawn.
        lines: of the plan, as the terminal has them.
        title: of the page.

    Raises:
        OSError: it cannot be written.
    """
    ranks = shown_ranks(estimate.plan.parallelism.pp, estimate.memory.rank)
    curves = [
        Line(f"pp rank {rank}", memory_curve(planner, estimate, rank), COLOURS[number])
        for number, rank in enumerate(ranks)
    ]
    name = f"GB of a rank in a step ({estimate.room / GB:.3g} are there)"
    chart = picture(name, line_chart(name, "seconds", curves, from_zero=True))
    key = "".join(
        f'<p><span class="key" style="background:{line.colour}"></span>{line.name}</p>\n'
        for line in curves
    )
    body = (
        f"<pre>{html.escape(chr(10).join(lines))}</pre>\n"
        f'<div class="panels">\n{chart}\n</div>\n{key}'
    )
    replace_text(target, page_html(title, body))
