"""How long a rank computes and waits: what ``simulate`` is given, and what it must foretell."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from pp_contestants import Sizes, batch, ours

from kenotron_dist import Mesh, barrier, receive, send
from kenotron_pp import SCHEDULES, Times, simulate
from kenotron_pp.backward import WeightPart
from kenotron_pp.executor import PipelineRun
from kenotron_pp.p2p import Links

WARM_UP = 2


class Clock:
    """Times of actions by (kind, stage), and of waiting, measured around the executor's parts."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for name in ("take", "release", "post", "finish"):
            self._wrap_wait(name)
        forward, backward, run = PipelineRun._forward, PipelineRun._backward, WeightPart.run
        PipelineRun._forward = lambda this, step: self._note(step, lambda: forward(this, step))
        PipelineRun._backward = lambda this, step: self._note(step, lambda: backward(this, step))
        self.weights: list[float] = []
        WeightPart.run = lambda this: self._note(None, lambda: run(this))

    def clear(self) -> None:
        """Forget what was measured."""
        self.times.clear()
        self.weights.clear()

    def _wrap_wait(self, name: str) -> None:
        inner = getattr(Links, name)

        def timed(this: Links, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(this, *args, **options)
            finally:
                self.waited += time.perf_counter() - start

        setattr(Links, name, timed)

    def _note(self, step: Any, action: Callable[[], Any]) -> None:
        start, waited = time.perf_counter(), self.waited
        action()
        spent = time.perf_counter() - start - (self.waited - waited)
        self.weights.append(spent) if step is None else self.times[
            step.action.kind, step.stage
        ].append(spent)


def observe(mesh: Mesh, sizes: Sizes, microbatches: int, rounds: int) -> dict[str, Any]:
    """Medians of this rank's actions and steps, by schedule, and of a transfer."""
    x = batch(sizes, microbatches)
    clock = Clock()
    found: dict[str, Any] = {"transfer": _transfer(mesh, x[0])}
    for name, schedule in SCHEDULES.items():
        step, _ = ours(mesh, sizes, name, x)
        walls = []
        for turn in range(WARM_UP + rounds):
            if turn == WARM_UP:
                clock.clear()
            barrier(mesh["pp"])
            start = time.perf_counter()
            step()
            barrier(mesh["pp"])
            walls.append(time.perf_counter() - start)
        own = {f"{kind}{stage}": statistics.median(t) for (kind, stage), t in clock.times.items()}
        if schedule.splits:
            weight = statistics.median(clock.weights)
            stages = range(schedule.chunks)
            own |= {f"W{schedule.stage(mesh.rank, c, mesh['pp'].size)}": weight for c in stages}
        found[name] = {"times": own, "wall": statistics.median(walls[WARM_UP:])}
    return found


def _transfer(mesh: Mesh, x: torch.Tensor) -> float:
    """Seconds of one activation to the other rank: half a round trip."""
    axis, other = mesh["pp"], 1 - mesh.rank
    seconds = []
    for i in range(30):
        start = time.perf_counter()
        if mesh.rank:
            receive(torch.empty_like(x), axis, other, 2 * i).wait()
            send(x, axis, other, 2 * i + 1).wait()
        else:
            back = receive(torch.empty_like(x), axis, other, 2 * i + 1)
            send(x, axis, other, 2 * i).wait()
            back.wait()
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)


def compare(ranks: list[dict[str, Any]], microbatches: int) -> dict[str, dict[str, float]]:
    """Measured and simulated: share of waiting, and seconds of a step."""
    table = {}
    for name, schedule in SCHEDULES.items():
        times = {key: value for rank in ranks for key, value in rank[name]["times"].items()}
        stages = range(len(ranks) * schedule.chunks)
        given = {kind: [times.get(f"{kind}{s}", 0.0) for s in stages] for kind in "FBIW"}
        transfer = max(rank["transfer"] for rank in ranks)
        trace = simulate(schedule, len(ranks), microbatches, Times(**given, transfer=transfer))
        wall = max(rank[name]["wall"] for rank in ranks)
        busy = microbatches * sum(times.values())
        table[name] = {
            "measured": 1 - busy / (len(ranks) * wall),
            "simulated": trace.bubble,
            "wall_of_simulated": wall / trace.ticks,
        }
    return table
