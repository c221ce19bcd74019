"""Changes that make a layout fit in memory, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from kenotron_config import Config
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.layouts import PlannedLayout, with_layout
from kenotron_cost.recomputed import recomputed
from kenotron_cost.search import Estimate, Planner, neighbours

GB = 1e9
SHOWN_REMEDIES = 5
LAST_KNOBS = (
    ("optimizer.offload", True),
    ("model.dtype", "bfloat16"),
    ("optimizer.accumulate_grad_in_fp32", False),
)
"""Keys that make a layout smaller and that a search changes only if asked: they change numbers or
need host memory."""
MOST_RANKS = 16384


def beyond(config: Config, planner: Planner, nearest: Estimate) -> Iterator[str]:
    """Yield what a search does not change and makes a layout fit: other keys, or more ranks."""
    layout, found = nearest.layout, False
    for key, value in LAST_KNOBS:
        changed = replace(layout, knobs=(*layout.knobs, (key, value)))
        each = _estimated(config, planner, changed)
        if key not in dict(layout.knobs) and each is not None and each.fits:
            found, ratio = True, each.time.seconds / nearest.time.seconds
            saved = (nearest.memory.total - each.memory.total) / GB
            yield (
                f"{key}={json.dumps(value)} makes the first one fit: {saved:.3g} GB less, the step "
                f"takes {ratio:.2f} times as long"
            )
    layout = replace(layout, zero=layout.zero or 3)  # stage 0 shares nothing
    while layout.ranks < MOST_RANKS:
        layout = replace(layout, dp=2 * layout.dp)
        each = _estimated(config, planner, layout)
        if each is not None and each.fits:
            zero = f"dp {layout.dp} and ZeRO {layout.zero}"
            yield f"--ranks {layout.ranks}: with {zero} the first one fits"
            return
    if not found:
        yield (
            f"Neither {', '.join(key for key, _ in LAST_KNOBS)} nor more ranks of dp make the "
            "first one fit: shorten tokens.sequence_length, or take devices with more memory"
        )


def _estimated(config: Config, planner: Planner, layout: PlannedLayout) -> Estimate | None:
    """Return the plan of a layout; None where it is not legal."""
    try:
        plan = cost_plan(with_layout(config, layout))
    except ValueError:
        return None
    return planner.estimate(layout, plan, recomputed(plan), exact=False)


def remedies(config: Config, planner: Planner, own: Estimate) -> Iterator[str]:
    """Yield the knobs that make a layout fit, the cheapest first."""
    named, estimates = {}, []
    for knob, layout in neighbours(own.layout):
        if (each := _estimated(config, planner, layout)) is not None:
            named[layout] = knob
            estimates.append(each)
    fitting = sorted((e for e in estimates if e.fits), key=lambda each: each.time.seconds)
    if not fitting:
        yield "No single knob makes it fit: search all layouts with --ranks"
    for each in fitting[:SHOWN_REMEDIES]:
        ratio = each.time.seconds / own.time.seconds
        saved = (own.memory.total - each.memory.total) / GB
        dp = f" with parallelism.dp={each.layout.dp}" if each.layout.dp != own.layout.dp else ""
        yield (
            f"{named[each.layout]}{dp} makes it fit: {saved:.3g} GB less, the step takes "
            f"{ratio:.2f} times as long"
        )
