"""Steps of a two-stage pipeline on gloo: this package against ``torch.distributed.pipelining``.

The same layers, schedules and micro-batches; contestants take turns, a round counts as long as its
slowest rank, and tables show medians. *Tiny* layers (one linear each) show what an action costs
beside computing, as CPU time of the thread that runs it. *Large* ones show what a pipeline costs
beside the same model in one process (CPU seconds of all ranks), and how well ``simulate``, given
measured times of every action, foretells the bubble.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from kenotron_dist import Mesh, barrier, spawn
from kenotron_pp import SCHEDULES, Pipeline, Schedule, Stages, Times, simulate
from kenotron_pp.backward import WeightPart
from kenotron_pp.p2p import Links
from kenotron_pp.step import Run

THEIRS: dict[str, Any] = {
    "afab": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
WARM_UP = 2
Sizes = tuple[int, int, int]
"""(width, layers, rows of a micro-batch)"""
TINY: Sizes = (8, 4, 1)
LARGE: Sizes = (512, 8, 128)


class Block(nn.Module):
    """Norm and a gated network: (N, width) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) -> (N, width)."""
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Tiny(nn.Linear):
    """Hardly anything: (N, width) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)


def model(sizes: Sizes) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    kind = Tiny if sizes == TINY else Block
    return [(str(i), kind(sizes[0])) for i in range(sizes[1])]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def chunks_of(mesh: Mesh, sizes: Sizes, schedule: Schedule) -> list[list[nn.Module]]:
    layers = model(sizes)
    stages = Stages.balanced(layers, [1.0] * len(layers), mesh["pp"].size, schedule)
    return [[layer for _, layer in chunk] for chunk in stages.chunks(layers, mesh["pp"].rank)]


def ours(mesh: Mesh, sizes: Sizes, name: str, x: Tensor) -> tuple[Callable[[], Any], Pipeline]:
    schedule = SCHEDULES[name]
    chunks = chunks_of(mesh, sizes, schedule)
    pipeline = Pipeline(chunks if schedule.chunks > 1 else chunks[0], mesh["pp"], schedule)
    inputs = list(x)
    return lambda: pipeline.run(inputs, lambda y, m: loss_of(y, inputs[m])), pipeline


def theirs(mesh: Mesh, sizes: Sizes, name: str, x: Tensor) -> Callable[[], Any]:
    schedule, axis = SCHEDULES[name], mesh["pp"]
    count = axis.size * schedule.chunks
    stages = [
        PipelineStage(
            nn.Sequential(*chunk), schedule.stage(axis.rank, i, axis.size), count,
            torch.device("cpu"), group=axis.group,
        )
        for i, chunk in enumerate(chunks_of(mesh, sizes, schedule))
    ]  # fmt: skip
    given = stages if schedule.chunks > 1 else stages[0]
    engine = THEIRS[name](given, len(x), loss_fn=loss_of, scale_grads=False)
    last = any(stage.is_last for stage in stages)
    flat = x.flatten(0, 1)
    feed = (flat,) if axis.rank == 0 else ()
    return lambda: engine.step(*feed, **({"target": flat, "losses": []} if last else {}))


def measure(mesh: Mesh, sizes: Sizes, microbatches: int, rounds: int) -> dict[str, Any]:
    """Seconds of every round on this rank, by contestant: wall, CPU, CPU of this thread."""
    warnings.simplefilter("ignore")  # torch's, about its own names
    x = torch.randn(microbatches, sizes[2], sizes[0], generator=torch.Generator().manual_seed(1))
    contestants = {f"{name}, ours": ours(mesh, sizes, name, x)[0] for name in SCHEDULES}
    contestants |= {f"{name}, torch": theirs(mesh, sizes, name, x) for name in THEIRS}
    wall: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    thread: dict[str, list[float]] = defaultdict(list)
    names = sorted(contestants)
    for turn in range(WARM_UP + rounds):
        k = turn % len(names)
        for name in names[k:] + names[:k]:
            barrier(mesh["pp"])
            start, used = time.perf_counter(), time.process_time()
            own = time.thread_time()
            contestants[name]()
            if turn >= WARM_UP:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - used)
                thread[name].append(time.thread_time() - own)
    return {"wall": dict(wall), "cpu": dict(cpu), "thread": dict(thread)}


def unpipelined(mesh: Mesh, sizes: Sizes, microbatches: int, rounds: int) -> list[float]:
    """CPU seconds of a step of the whole model in one process."""
    layers = nn.Sequential(*[layer for _, layer in model(sizes)])
    x = torch.randn(microbatches, sizes[2], sizes[0])
    found = []
    for turn in range(WARM_UP + rounds):
        used = time.process_time()
        for each in x:
            loss_of(layers(each), each).backward()
        if turn >= WARM_UP:
            found.append(time.process_time() - used)
    return found


class Clock:
    """Times of actions by (kind, stage), and of waiting, measured around the executor's parts."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for name in ("take", "release", "post", "finish"):
            self._wrap_wait(name)
        forward, backward, run = Run._forward, Run._backward, WeightPart.run
        Run._forward = lambda this, step: self._note(step, lambda: forward(this, step))
        Run._backward = lambda this, step: self._note(step, lambda: backward(this, step))
        self.weights: list[float] = []
        WeightPart.run = lambda this: self._note(None, lambda: run(this))

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


def bubbles(mesh: Mesh, sizes: Sizes, microbatches: int, rounds: int) -> dict[str, Any]:
    """Share of the step that this rank waits, and medians of its actions' times."""
    x = torch.randn(microbatches, sizes[2], sizes[0])
    clock = Clock()
    found = {}
    for name in SCHEDULES:
        step, pipeline = ours(mesh, sizes, name, x)
        walls = []
        for turn in range(WARM_UP + rounds):
            barrier(mesh["pp"])
            clock.waited = 0.0
            if turn == WARM_UP:
                clock.times.clear()
                clock.weights.clear()
            start = time.perf_counter()
            step()
            barrier(mesh["pp"])
            wall = time.perf_counter() - start
            if turn >= WARM_UP:
                walls.append(wall)
        own = {f"{kind}{stage}": statistics.median(t) for (kind, stage), t in clock.times.items()}
        weight = statistics.median(clock.weights) if clock.weights else 0.0
        stages = [pipeline.schedule.stage(mesh["pp"].rank, c, mesh["pp"].size)
                  for c in range(pipeline.schedule.chunks)]  # fmt: skip
        own |= {f"W{stage}": weight for stage in stages}
        busy = (
            microbatches * sum(own.values())
            if pipeline.schedule.splits
            else microbatches * sum(seconds for key, seconds in own.items() if key[0] != "W")
        )
        found[name] = {"times": own, "busy": busy, "wall": statistics.median(walls)}
    return found


def compare_bubbles(ranks: list[dict[str, Any]], microbatches: int) -> dict[str, Any]:
    table = {}
    for name, schedule in SCHEDULES.items():
        times = {k: v for rank in ranks for k, v in rank[name]["times"].items()}
        stages = range(len(ranks) * schedule.chunks)
        given = {k: [times.get(f"{k}{s}", 0.0) for s in stages] for k in "FBIW"}
        trace = simulate(schedule, len(ranks), microbatches, Times(**given))
        wall = max(rank[name]["wall"] for rank in ranks)
        busy = sum(rank[name]["busy"] for rank in ranks)
        table[name] = {
            "measured": 1 - busy / (len(ranks) * wall),
            "simulated": trace.bubble,
            "wall_of_simulated": wall / trace.ticks,
        }
    return table


def slowest(ranks: list[dict[str, Any]], key: str, name: str) -> float:
    combine = max if key == "wall" else sum
    rounds = zip(*(rank[key][name] for rank in ranks), strict=True)
    return statistics.median(combine(each) for each in rounds)


def surroundings() -> dict[str, Any]:
    """Hardware, versions and commit that the figures belong to."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit}
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        **versions,
    }


def report(title: str, sizes: Sizes, microbatches: int, rounds: int) -> dict[str, Any]:
    ranks = spawn(measure, sizes, microbatches, rounds, pp=2)
    [alone] = spawn(unpipelined, sizes, microbatches, rounds)
    print(f"\n{title}: width, layers, rows {sizes}, {microbatches} micro-batches")
    print(f"{'schedule':<14}{'ours ms':>9}{'torch ms':>10}{'ratio':>7}{'us/action':>11}"
          f"{'torch':>8}{'CPU of 1':>10}{'torch':>8}")  # fmt: skip
    found = {}
    for name, schedule in SCHEDULES.items():
        actions = (3 if schedule.splits else 2) * schedule.chunks * microbatches
        row = {}
        for who in ("ours", "torch"):
            if f"{name}, {who}" in ranks[0]["wall"]:
                wall = slowest(ranks, "wall", f"{name}, {who}")
                cpu = slowest(ranks, "cpu", f"{name}, {who}")
                beside = slowest(ranks, "thread", f"{name}, {who}") - statistics.median(alone)
                row[who] = {"wall_ms": wall * 1e3, "us_an_action": beside / 2 / actions * 1e6,
                            "cpu_of_one_process": cpu / statistics.median(alone)}  # fmt: skip
        mine, other = row["ours"], row.get("torch")
        nan = float("nan")
        there = other or dict.fromkeys(mine, nan)
        print(f"{name:<14}{mine['wall_ms']:>9.1f}{there['wall_ms']:>10.1f}"
              f"{mine['wall_ms'] / there['wall_ms']:>7.2f}{mine['us_an_action']:>11.0f}"
              f"{there['us_an_action']:>8.0f}{mine['cpu_of_one_process']:>10.3f}"
              f"{there['cpu_of_one_process']:>8.3f}")  # fmt: skip
        found[name] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipeline steps on two gloo ranks.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    options = parser.parse_args()
    found: dict[str, Any] = surroundings()
    for count in options.microbatches:
        found[f"tiny, {count}"] = report("tiny", TINY, count, 3 * options.rounds)
        found[f"large, {count}"] = report("large", LARGE, count, options.rounds)
        ranks = spawn(bubbles, LARGE, count, options.rounds, pp=2)
        found[f"bubble, {count}"] = table = compare_bubbles(ranks, count)
        print(f"\nbubble, {count} micro-batches: measured, simulated, wall / simulated wall")
        for name, row in table.items():
            print(f"{name:<14}" + "".join(f"{value:>9.3f}" for value in row.values()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
