"""A transformer block and an LM head cut over ranks: this package against torch's DTensor.

Forward and backward of a Llama-like block and of hidden states to cross entropy, on processes of
one thread each (gloo, or nccl with a GPU a process). Beside DTensor's plans runs the uncut module,
the same work on every process at the same time: with t ranks nothing can take less than 1/t of it.
Before anything is timed all contestants have shown the same outputs and gradients. In every round
each runs once, in an order drawn for the round, after a barrier; a round counts as long as its
slowest rank, and the table shows medians over the rounds.

``busy`` is the processor time of a process's main thread, without waiting and without the
backend's threads: it tells computing and Python's share from communication, and hardly minds what
else the machine does (on cuda it is the forward's only). ``sent`` and ``calls`` are one rank's in
one step, ``peak`` is the most memory that a step holds beyond weights and input. The ratios are to
the fastest DTensor row and to the uncut module.

The rows that end in ``alone`` are this package's without communication. ``hidden`` is how much of
what communication adds to a step is gone with ``overlap``: 1 - (overlap - alone) / (plain - alone),
where alone is that of the layers without overlap, so that what splitting a product costs counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tp_contestants import NO_COMMUNICATION, WHOLE, blocks, heads
from tp_meters import Traffic, check, peak_bytes
from tp_models import SIZES

from kenotron_dist import Mesh, barrier, spawn

PARTS = {"block": blocks, "head": heads}
KINDS = {  # name: (dtype of the weights, autocast to bf16, tolerance of the comparison)
    "fp32": (torch.float32, False, 1e-4),
    "autocast": (torch.float32, True, 3e-2),
    "bf16": (torch.bfloat16, False, 5e-2),
}
TURNS = {"small": 8, "medium": 2, "large": 1}  # rounds of a size for one of the largest


class Found(NamedTuple):
    """What one rank knows of a contestant."""

    seconds: list[float]
    """Of every round."""
    busy: list[float]
    """Processor seconds of this thread, of every round."""
    sent: float
    """Bytes that this rank sends in a step."""
    calls: int
    """Collectives, or sends to one rank, that it starts in a step."""
    peak: int
    """Bytes that a step holds at most, beyond weights and input."""


def measure(mesh: Mesh, part: str, size: str, kind: str, rounds: int) -> dict[str, Found]:
    """Everything about the contestants of a part, by name, on this rank."""
    dtype, autocast, tolerance = KINDS[kind]
    axis = mesh["tp"]
    contestants = PARTS[part](SIZES[size], mesh, dtype)
    check(contestants, axis, autocast, tolerance)
    found: dict[str, Found] = {}
    for name, contestant in contestants.items():
        traffic, peaks = Traffic(axis.size, mesh.backend == "gloo"), []
        with contestant.around():
            with traffic:
                contestant.step(autocast)
            for _ in range(2):  # a backend's thread may free a tensor late
                contestant.clear()
                peaks.append(peak_bytes(lambda: contestant.step(autocast), mesh.device))  # noqa: B023
            contestant.clear()
        found[name] = Found([], [], traffic.sent, traffic.calls, min(peaks))
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(found), len(found)):
            contestant = contestants[name]
            barrier(axis)
            with contestant.around():
                start, busy = now(mesh.device), time.thread_time()
                contestant.step(autocast)
                found[name].busy.append(time.thread_time() - busy)
                found[name].seconds.append(now(mesh.device) - start)
            contestant.clear()
    return found


def now(device: torch.device) -> float:
    """The time, when the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def rows_of(ranks: list[dict[str, Found]], tokens: int) -> list[dict[str, Any]]:
    """One row for every contestant."""
    rounds = {
        name: list(map(max, zip(*(rank[name].seconds for rank in ranks), strict=True)))
        for name in ranks[0]
    }
    medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    torchs = min(median for name, median in medians.items() if name.startswith("DTensor"))
    return [
        {
            "contestant": name,
            "median_s": median,
            "busy_s": max(statistics.median(rank[name].busy) for rank in ranks),
            "tokens_per_s": tokens / median,
            "of_torch": median / torchs,
            "of_whole": median / medians[WHOLE],
            "sent_bytes": max(rank[name].sent for rank in ranks),
            "calls": max(rank[name].calls for rank in ranks),
            "peak_bytes": max(rank[name].peak for rank in ranks),
            "hidden": hidden(name, medians),
            "rounds": len(rounds[name]),
            "quartiles_s": statistics.quantiles(rounds[name]) if len(rounds[name]) > 1 else None,
        }
        for name, median in medians.items()
    ]


def hidden(name: str, medians: dict[str, float]) -> float | None:
    """The share of communication that overlap hides.

    None where that is no question, and where communication adds less than a fiftieth: noise.
    """
    plain = name.removesuffix(", overlap")
    alone = medians.get(plain + NO_COMMUNICATION)
    if name == plain or alone is None or medians[plain] < 1.02 * alone:
        return None
    return 1 - (medians[name] - alone) / (medians[plain] - alone)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one part, size and kind."""
    width = max(len(row["contestant"]) for row in rows)
    print(
        f"{'contestant':<{width}} {'ms':>8} {'busy ms':>8} {'tokens/s':>9} of torch of whole "
        f"{'sent MB':>8} {'calls':>5} {'peak MB':>8} hidden"
    )
    for row in rows:
        share = "" if row["hidden"] is None else f"{row['hidden']:.0%}"
        print(
            f"{row['contestant']:<{width}} {row['median_s'] * 1e3:>8.1f} "
            f"{row['busy_s'] * 1e3:>8.1f} {row['tokens_per_s']:>9.0f} "
            f"{row['of_torch']:>8.2f} {row['of_whole']:>8.2f} {row['sent_bytes'] / 2**20:>8.2f} "
            f"{row['calls']:>5} {row['peak_bytes'] / 2**20:>8.1f} {share:>6}"
        )


def surroundings(device: str, tp: int) -> dict[str, Any]:
    """Hardware, versions and commit that the figures belong to."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit}
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "gpu": gpu}
    return {"system": platform.platform(), **hardware, "device": device, "tp": tp, **versions}


def keep(file: Path, table: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Put a table in the file in the place of an earlier one; a run that is cut off loses one."""
    known = json.loads(file.read_text()) if file.exists() else []
    what = ("part", "size", "kind", "device", "tp")
    others = [each for each in known if any(each[name] != table[name] for name in what)]
    file.write_text(json.dumps([*others, {**table, "rows": rows}], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Block and LM head: ours against DTensor.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=5, help="of the largest; others get more")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["fp32", "autocast"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tp", type=int, help="ranks (default: 2, or 1 with one GPU)")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its start and stop
    few = options.device == "cuda" and torch.accelerator.device_count() < 2
    tp = options.tp or (1 if few else 2)
    if any(SIZES[size].kv_heads % tp for size in options.sizes):
        parser.error(f"--tp {tp} does not divide the kv heads of all sizes")
    where = surroundings(options.device, tp)
    for size in options.sizes:
        for part in options.parts:
            for kind in options.kinds:
                rounds = options.rounds * TURNS[size]
                ranks = spawn(measure, part, size, kind, rounds, tp=tp, device=options.device)
                rows = rows_of(ranks, SIZES[size].tokens)
                print(f"\n{part}, {size} ({SIZES[size].tokens} tokens), {kind}, {rounds} rounds")
                show(rows)
                if options.json:
                    keep(options.json, {"part": part, "size": size, "kind": kind, **where}, rows)


if __name__ == "__main__":
    main()
