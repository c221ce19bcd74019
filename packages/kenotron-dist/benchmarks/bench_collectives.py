"""Our sums over ranks on gloo against torch.distributed's own, on 2 and 4 local processes.

Ours exchange pieces and add them in a fixed tree; gloo's reductions add in an order that depends on
an element's place. Both give a new tensor. gloo's threads run as torch leaves them in its turns, as
a mesh sets them in ours; ``plain`` is ours with threads as torch leaves them. In every round each
contestant runs once, after a barrier; a round counts as long as its slowest rank, and the table
shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron_dist import Mesh, all_reduce, barrier, reduce_scatter, spawn
from kenotron_dist.gloo_threads import gloo_threads, let_gloo_threads_wait

SIZES = {"64 B": 64, "1 KB": 2**10, "16 KB": 2**14, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 3
Case = tuple[str, str, str]
"""(verb, dtype, size)"""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def torch_all_reduce(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def torch_reduce_scatter(x: Tensor) -> Tensor:
    out = x.new_empty(x.numel() // dist.get_world_size())
    reduce_scatter_single(out, x)
    return out


def let_gloo_threads_preempt() -> None:
    """Give gloo's threads the policy again that torch leaves them with."""
    for thread in gloo_threads():
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def measure(mesh: Mesh, rounds: int) -> dict[Case, dict[str, list[float]]]:
    """Seconds of every round on this rank, by case and contestant."""
    axis = mesh["dp"]
    ours: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: all_reduce(x, axis),
        "reduce_scatter": lambda x: reduce_scatter(x, axis),
    }
    torchs = {"all_reduce": torch_all_reduce, "reduce_scatter": torch_reduce_scatter}
    found: dict[Case, dict[str, list[float]]] = {}
    for dtype_name, dtype in DTYPES.items():
        for size_name, size in SIZES.items():
            x = torch.randn(size // dtype.itemsize).to(dtype)
            for verb in ours:
                contestants = {"ours": ours[verb], "plain": ours[verb], "torch": torchs[verb]}
                times = {name: [] for name in contestants}
                turns = 4 * rounds if size < 2**20 else rounds
                for turn in range(WARM_UP + turns):
                    order = list(contestants)[:: 1 if turn % 2 else -1]
                    for name in order:
                        if name == "ours":
                            let_gloo_threads_wait()
                        else:
                            let_gloo_threads_preempt()
                        barrier(axis)
                        start = time.perf_counter()
                        contestants[name](x)
                        if turn >= WARM_UP:
                            times[name].append(time.perf_counter() - start)
                found[verb, dtype_name, size_name] = times
    return found


def table(ranks: int, rounds: int) -> list[dict[str, object]]:
    """One row for every case: medians in microseconds and their ratio."""
    by_rank = spawn(measure, rounds, dp=ranks)
    rows: list[dict[str, object]] = []
    for case in by_rank[0]:
        medians = {
            name: statistics.median(map(max, zip(*(r[case][name] for r in by_rank), strict=True)))
            for name in by_rank[0][case]
        }
        rows.append(
            {
                "ranks": ranks,
                **dict(zip(("verb", "dtype", "size"), case, strict=True)),
                **{f"{name}_us": seconds * 1e6 for name, seconds in medians.items()},
                "ratio": medians["ours"] / medians["torch"],
            }
        )
    return rows


def surroundings() -> dict[str, object]:
    """Hardware, versions and commit that the figures belong to."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Sums on gloo: ours against torch's own.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=15, help="of the largest sizes")
    options = parser.parse_args()
    print(
        f"{'ranks':>5} {'verb':<14} {'dtype':<5} {'size':>6} {'ours us':>9} {'plain us':>9} "
        f"{'torch us':>9} ours/torch"
    )
    rows = []
    for ranks in (2, 4):
        for row in table(ranks, options.rounds):
            rows.append(row)
            print(
                f"{row['ranks']:>5} {row['verb']:<14} {row['dtype']:<5} {row['size']:>6} "
                f"{row['ours_us']:>9.0f} {row['plain_us']:>9.0f} {row['torch_us']:>9.0f} "
                f"{row['ratio']:>10.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps({**surroundings(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
