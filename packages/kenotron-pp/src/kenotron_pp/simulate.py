"""Run a schedule without processes: proof of order and of absence of deadlock, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kenotron_pp.schedule import Action, Schedule


@dataclass(frozen=True)
class Trace:
    """What a schedule costs when a forward and a backward take one tick each."""

    ticks: int
    bubble: float
    """Share of all stages' ticks in which a stage waits."""
    peak_live: tuple[int, ...]
    """Most micro-batches alive at once (forward done, backward not), for each stage."""


def simulate(schedule: Schedule, n_stages: int, n_microbatches: int) -> Trace:
    """Execute a schedule tick by tick on ``n_stages`` imaginary stages.

    A forward needs the stage before to have done it, a backward the stage after; a result can be
    used in the next tick. Raises ValueError naming the stuck actions when the lists deadlock, when
    a micro-batch is missing or repeated, or when a backward comes before its forward.
    """
    lists = [schedule(stage, n_stages, n_microbatches) for stage in range(n_stages)]
    for stage, actions in enumerate(lists):
        _check_complete(stage, actions, n_microbatches)
    done: set[tuple[int, Action]] = set()
    place = [0] * n_stages
    ticks = 0
    while any(place[s] < len(lists[s]) for s in range(n_stages)):
        ready = [
            (s, lists[s][place[s]])
            for s in range(n_stages)
            if place[s] < len(lists[s]) and _needs(s, lists[s][place[s]], n_stages) <= done
        ]
        if not ready:
            stuck = [
                f"stage {s} at {lists[s][p]}" for s, p in enumerate(place) if p < len(lists[s])
            ]
            raise ValueError(f"schedule deadlocks: {', '.join(stuck)}")
        for stage, action in ready:
            place[stage] += 1
            done.add((stage, action))
        ticks += 1
    busy = sum(len(actions) for actions in lists)
    return Trace(ticks, 1 - busy / (ticks * n_stages), tuple(_peak(actions) for actions in lists))


def _needs(stage: int, action: Action, n_stages: int) -> set[tuple[int, Action]]:
    if action.kind == "F":
        return {(stage - 1, action)} if stage else set()
    own = (stage, Action("F", action.microbatch))
    return {own, (stage + 1, action)} if stage < n_stages - 1 else {own}


def _peak(actions: Sequence[Action]) -> int:
    live = peak = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        peak = max(peak, live)
    return peak


def _check_complete(stage: int, actions: Sequence[Action], n_microbatches: int) -> None:
    for kind in ("F", "B"):
        order = [a.microbatch for a in actions if a.kind == kind]
        if order != list(range(n_microbatches)):
            raise ValueError(
                f"stage {stage} runs {kind} of micro-batches {order}: each of "
                f"{n_microbatches} must come once, in ascending order"
            )
