"""Steps of a two-stage pipeline on gloo: this package against ``torch.distributed.pipelining``.

The same layers, schedules and micro-batches; contestants take turns, and tables show medians of
the rounds, a round counting as long as its slowest rank. *Tiny* layers (one linear each) show what
an engine costs beside the actions: CPU time of its thread beyond that of 1F1B written out by hand.
*Large* ones show what a pipeline costs beside the whole model (CPU seconds of both ranks, against
two processes that each compute the whole model at the same time), and how well ``simulate``, given
measured times, foretells the bubble.
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
from pathlib import Path
from typing import Any

import torch
from pp_clock import WARM_UP, compare, observe
from pp_contestants import LARGE, THEIRS, TINY, Sizes, batch, by_hand, loss_of, model, ours, theirs
from torch import nn

from kenotron_dist import Mesh, barrier, spawn
from kenotron_pp import SCHEDULES

HAND = "by hand"
Rounds = dict[str, list[float]]


def measure(mesh: Mesh, sizes: Sizes, microbatches: int, rounds: int) -> dict[str, Rounds]:
    """Seconds of every round on this rank, by contestant: wall, CPU, CPU of this thread."""
    warnings.simplefilter("ignore")  # torch's, about its own names
    x = batch(sizes, microbatches)
    steps = {f"{name}, ours": ours(mesh, sizes, name, x)[0] for name in SCHEDULES}
    steps |= {f"{name}, torch": theirs(mesh, sizes, name, x) for name in THEIRS}
    steps[HAND] = by_hand(mesh, sizes, x)
    clocks = {"wall": time.perf_counter, "cpu": time.process_time, "thread": time.thread_time}
    found: dict[str, Rounds] = {name: defaultdict(list) for name in clocks}
    names = sorted(steps)
    for turn in range(WARM_UP + rounds):
        k = turn % len(names)
        for name in names[k:] + names[:k]:
            barrier(mesh["pp"])
            before = {clock: read() for clock, read in clocks.items()}
            steps[name]()
            if turn >= WARM_UP:
                for clock, read in clocks.items():
                    found[clock][name].append(read() - before[clock])
    return {clock: dict(rounds_of) for clock, rounds_of in found.items()}


def whole(mesh: Mesh, sizes: Sizes, microbatches: int, rounds: int) -> list[float]:
    """CPU seconds of a step of the whole model, while the other rank computes another."""
    layers = nn.Sequential(*[layer for _, layer in model(sizes)])
    x = batch(sizes, microbatches)
    found = []
    for turn in range(WARM_UP + rounds):
        barrier(mesh["pp"])
        used = time.process_time()
        for each in x:
            loss_of(layers(each), each).backward()
        if turn >= WARM_UP:
            found.append(time.process_time() - used)
    return found


def median_of(ranks: list[dict[str, Rounds]], clock: str, name: str) -> float:
    """Of the rounds: the slowest rank's wall time, or all ranks' CPU time."""
    combine = max if clock == "wall" else sum
    rounds = zip(*(rank[clock][name] for rank in ranks), strict=True)
    return statistics.median(combine(each) for each in rounds)


def report(title: str, sizes: Sizes, microbatches: int, rounds: int) -> dict[str, Any]:
    """Print and return one table."""
    ranks = spawn(measure, sizes, microbatches, rounds, pp=2)
    alone = statistics.mean(map(statistics.median, spawn(whole, sizes, microbatches, rounds, pp=2)))
    floor = median_of(ranks, "thread", HAND) / (4 * microbatches)  # seconds an action
    print(f"\n{title}: width, layers, rows {sizes}, {microbatches} micro-batches")
    print(f"by hand (1f1b): {median_of(ranks, 'wall', HAND) * 1e3:.1f} ms, "
          f"{floor * 1e6:.0f} us an action")  # fmt: skip
    print(f"{'':14}{'ours ms':>9}{'torch ms':>10}{'ratio':>7}   beside by hand, us{'torch':>8}"
          f"{'ratio':>7}   CPU / whole{'torch':>8}")  # fmt: skip
    found: dict[str, Any] = {HAND: {"wall_ms": median_of(ranks, "wall", HAND) * 1e3}}
    for name, schedule in SCHEDULES.items():
        actions = (6 if schedule.splits else 4) * schedule.chunks * microbatches
        row = {}
        for who in ("ours", "torch"):
            key = f"{name}, {who}"
            if key in ranks[0]["wall"]:
                row[who] = {
                    "wall_ms": median_of(ranks, "wall", key) * 1e3,
                    "us_an_action": median_of(ranks, "thread", key) / actions * 1e6,
                    "us_beside_by_hand": (median_of(ranks, "thread", key) / actions - floor) * 1e6,
                    "cpu_of_whole": median_of(ranks, "cpu", key) / alone,
                }
        print_row(name, row["ours"], row.get("torch"))
        found[name] = row
    return found


def print_row(name: str, mine: dict[str, float], other: dict[str, float] | None) -> None:
    there = other or dict.fromkeys(mine, float("nan"))
    beside, their_beside = mine["us_beside_by_hand"], there["us_beside_by_hand"]
    print(f"{name:<14}{mine['wall_ms']:>9.1f}{there['wall_ms']:>10.1f}"
          f"{mine['wall_ms'] / there['wall_ms']:>7.2f}{beside:>21.0f}{their_beside:>8.0f}"
          f"{beside / their_beside:>7.2f}{mine['cpu_of_whole']:>14.3f}"
          f"{there['cpu_of_whole']:>8.3f}")  # fmt: skip


def surroundings() -> dict[str, Any]:
    """Hardware, versions and commit that the figures belong to."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipeline steps on two gloo ranks.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    options = parser.parse_args()
    found: dict[str, Any] = surroundings()
    for count in options.microbatches:
        found[f"tiny, {count}"] = report("tiny", TINY, count, 5 * options.rounds)
        found[f"large, {count}"] = report("large", LARGE, count, options.rounds)
        table = compare(spawn(observe, LARGE, count, options.rounds, pp=2), count)
        found[f"bubble, {count}"] = table
        print(f"\nbubble, {count} micro-batches: measured, simulated, wall / simulated wall")
        for name, row in table.items():
            print(f"{name:<14}" + "".join(f"{value:>9.3f}" for value in row.values()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
