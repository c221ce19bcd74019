"""Whole training steps of a model of 50 M parameters on gloo ranks: ZeRO 1 to 3, DDP and FSDP2.

Contestants take turns in one run, each after a barrier. A step counts as long as its slowest rank;
the table has medians. CPU seconds are those of all ranks, with threads of gloo: on ranks that share
cores they say what a contestant costs, whatever else runs. Memory and bytes: as in ``bench_step``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench_step import costs, surroundings
from optim_contestants import CONTESTANTS, WIDTH

from kenotron_dist import Mesh, barrier, spawn

NAMES = [name for name in CONTESTANTS if name not in ("ours, ZeRO 0", "ours, ZeRO 1, Muon")]
MUON = ["ours, ZeRO 1", "ours, ZeRO 1, Muon"]
WARM_UP = 2


def times(
    mesh: Mesh, names: list[str], tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, CPU seconds) of each step of this rank, by contestant."""
    steps = {name: CONTESTANTS[name](mesh, torch.float32) for name in names}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(WARM_UP + rounds):
        x = torch.randn(tokens, WIDTH)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            module, step = steps[name]
            barrier(mesh["dp"])
            start, used = time.perf_counter(), time.process_time()
            step(module(x).square().mean() / mesh["dp"].size)
            took = time.perf_counter() - start
            barrier(mesh["dp"])  # what is in flight after the step is part of it
            if turn >= WARM_UP:
                found[name].append((took, time.process_time() - used))
    return found


def report(
    names: list[str], dp: int, tokens: int, rounds: int, *, memory: bool = True
) -> dict[str, dict[str, float]]:
    """Print and return one table, with ratios to its first contestant."""
    ranks = spawn(times, names, tokens, rounds, dp=dp)
    table: dict[str, dict[str, float]] = {}
    for name in names:
        by_step = list(zip(*(rank[name] for rank in ranks), strict=True))
        seconds = statistics.median(max(took for took, _ in step) for step in by_step)
        used = statistics.median(sum(cpu for _, cpu in step) for step in by_step)
        table[name] = {"tokens_per_s": dp * tokens / seconds, "cpu_s": used}
        if memory:
            peaks, sent = zip(*spawn(costs, torch.float32, name, dp=dp), strict=True)
            table[name] |= {"peak_mb": max(peaks), "sent_mb": max(sent) / dp}
    print(f"\n{dp} ranks, {tokens} tokens a rank and step")
    print(f"{'':22}{'tokens/s':>9}{'ratio':>7}{'CPU s':>8}{'peak MB':>9}{'MB sent':>9}")
    first = table[names[0]]["tokens_per_s"]
    for name, row in table.items():
        cells = (
            f"{row['tokens_per_s']:>9.0f}{row['tokens_per_s'] / first:>7.2f}{row['cpu_s']:>8.2f}"
        )
        print(f"{name:<22}{cells}" + "".join(f"{row[k]:>9.0f}" for k in row if k.endswith("mb")))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of ZeRO 1 to 3, DDP and FSDP2.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's step")
    options = parser.parse_args()
    found: dict[str, Any] = surroundings()
    for dp in (2, 4):
        found[f"dp {dp}"] = report(NAMES, dp, options.tokens, options.rounds)
    found["muon, 4096 tokens"] = report(MUON, 2, 4096, max(options.rounds // 3, 2), memory=False)
    found["load after"] = surroundings()["load"]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
