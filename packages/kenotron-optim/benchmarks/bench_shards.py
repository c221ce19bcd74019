"""Whole training steps of models of 50 M and 300 M parameters: ZeRO 1 to 3 and what others offer.

Contestants that are compared take turns in one run, each after a barrier. A step counts as long as
its slowest rank. A speed is the median, over turns, of another one's time divided by ours: what
else runs on the machine slows both. CPU seconds are those of all ranks, with threads of gloo.
Memory and bytes: as in ``bench_step``, with the forward; a contestant that fails has its error.
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
from optim_contestants import CONTESTANTS, LARGE, SMALL, Size

from kenotron_dist import Mesh, RankError, barrier, spawn

GROUPS = [
    ["ours, ZeRO 1", "torch DDP", "torch DDP + ZeRO"],
    ["ours, ZeRO 2", "ours, ZeRO 1", "torch FSDP2"],
    ["ours, ZeRO 2", "DeepSpeed, ZeRO 2"],
    ["ours, ZeRO 3", "torch FSDP2, reshard"],
    ["ours, ZeRO 3", "DeepSpeed, ZeRO 3"],
]
"""Who takes turns: the first is compared with the others."""
MUON = ["ours, ZeRO 1, Muon", "ours, ZeRO 1"]
WARM_UP = 2
Row = dict[str, float | str]


def times(
    mesh: Mesh, names: list[str], size: Size, tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, CPU seconds) of each step of this rank, by contestant."""
    steps = {name: CONTESTANTS[name](mesh, torch.float32, size) for name in names}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(WARM_UP + rounds):
        x = torch.randn(tokens, size.width)
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


def compare(names: list[str], size: Size, dp: int, tokens: int, rounds: int) -> dict[str, Row]:
    """Rows of contestants that take turns; an error where one of them fails."""
    try:
        ranks = spawn(times, names, size, tokens, rounds, dp=dp)
    except (RankError, ImportError) as error:
        return {names[-1]: {"error": str(error).splitlines()[0]}}
    seconds, used = {}, {}
    for name in names:
        by_step = list(zip(*(rank[name] for rank in ranks), strict=True))
        seconds[name] = [max(took for took, _ in step) for step in by_step]
        used[name] = [sum(cpu for _, cpu in step) for step in by_step]
    first = names[0]
    return {
        name: {
            "tokens_per_s": dp * tokens / statistics.median(seconds[name]),
            "cpu_s": statistics.median(used[name]),
            f"speed of {first}": _ratio(seconds[name], seconds[first]),
            f"CPU speed of {first}": _ratio(used[name], used[first]),
        }
        for name in names
    }


def _ratio(others: list[float], own: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(others, own, strict=True))


def spent(name: str, size: Size, dp: int) -> Row:
    """Memory and bytes of a contestant."""
    try:
        peaks, sent = zip(*spawn(costs, torch.float32, name, size, "forward", dp=dp), strict=True)
    except (RankError, ImportError) as error:
        return {"error": str(error).splitlines()[0]}
    return {"peak_mb": max(peaks), "sent_mb_per_rank": max(sent) / dp}


def report(groups: list[list[str]], size: Size, dp: int, tokens: int, rounds: int) -> dict:
    """Print and return what was measured of some groups, and of each contestant alone."""
    print(f"\n{size}, {dp} ranks, {tokens} tokens a rank and step", flush=True)
    found: dict[str, Any] = {"tokens": tokens, "speeds": {}, "costs": {}}
    for names in groups:
        rows = compare(names, size, dp, tokens, rounds)
        found["speeds"][" / ".join(names)] = rows
        for name, row in rows.items():
            print(f"  {name:22}", *(f"{k} {_shown(v)}" for k, v in row.items()), sep="  ")
        print(flush=True)
    for name in dict.fromkeys(name for names in groups for name in names):
        found["costs"][name] = spent(name, size, dp)
        print(f"  {name:22}", *(f"{k} {_shown(v)}" for k, v in found["costs"][name].items()))
    return found


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def muon(rounds: int, tokens: int) -> Row:
    """What Muon adds to a step of few tokens, as a share of a step of ``tokens`` with AdamW."""
    few, many = (
        spawn(times, names, SMALL, count, turns, dp=2)
        for names, count, turns in ((MUON, 64, rounds), (MUON[1:], tokens, 2))
    )
    with_muon, adamw = (
        [max(took for took, _ in step) for step in zip(*(r[name] for r in few), strict=True)]
        for name in MUON
    )
    steps = [
        max(took for took, _ in step) for step in zip(*(r[MUON[1]] for r in many), strict=True)
    ]
    added = statistics.median(a - b for a, b in zip(with_muon, adamw, strict=True))
    whole = statistics.median(steps)
    return {"added_s": added, "step_s": whole, "share": added / whole, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of ZeRO 1 to 3, DDP, FSDP2, DeepSpeed.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's step")
    parser.add_argument("--parts", default="50 M,300 M,muon", help="some of these")
    options = parser.parse_args()
    found: dict[str, Any] = surroundings()
    if "50 M" in options.parts:
        for dp in (2, 4):
            found[f"50 M, dp {dp}"] = report(GROUPS, SMALL, dp, options.tokens, options.rounds)
    if "300 M" in options.parts:  # memory holds two contestants at a time
        pair = [["ours, ZeRO 3", "torch FSDP2, reshard"]]
        for dp in (2, 4):
            found[f"300 M, dp {dp}"] = report(pair, LARGE, dp, options.tokens // 4, 3)
    if "muon" in options.parts:
        found["muon, dp 2"] = muon(options.rounds, 4096)
        print(found["muon, dp 2"])
    found["load after"] = surroundings()["load"]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
