"""From the start of the last backward to updated parameters, on two data-parallel gloo ranks.

Time: contestants take turns in one run, each after a barrier; a round counts as long as its
slowest rank, and the table shows medians. Memory and traffic: each contestant alone in new
processes: the peak of its resident memory above what the process had before, and the bytes that
crossed the loopback device (half of them are a rank's).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from optim_contestants import CONTESTANTS, SMALL, WIDTH, Size

from kenotron_dist import Mesh, barrier, spawn

ROWS = 16
"""Of one rank's batch: the forward is not timed, the backward should not be much."""
WARM_UP = 3
NAMES = [name for name in CONTESTANTS if not name.startswith("DeepSpeed")]


def times(mesh: Mesh, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round on this rank, by contestant."""
    steps = {name: CONTESTANTS[name](mesh, dtype, SMALL) for name in NAMES}
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = NAMES
    for turn in range(WARM_UP + rounds):
        x = torch.randn(ROWS, WIDTH, dtype=dtype)
        k = turn % len(names)
        for name in names[k:] + names[:k]:
            module, step = steps[name]
            loss = module(x).float().square().mean() / 2
            barrier(mesh["dp"])
            start = time.perf_counter()
            step(loss)
            if turn >= WARM_UP:
                found[name].append(time.perf_counter() - start)
    return found


def costs(
    mesh: Mesh, dtype: torch.dtype, name: str, size: Size = SMALL, begins: str = "backward"
) -> tuple[float, float]:
    """(MB of memory at the peak of a step, MB sent by all ranks in a step) of one contestant.

    ``begins``: where counting begins, ``forward`` or ``backward``. The least of several steps is
    returned: other processes may send something.
    """
    barrier(mesh["dp"])
    before = _resident("VmRSS")
    module, step = CONTESTANTS[name](mesh, dtype, size)
    sent = []
    for turn in range(5):
        x = torch.randn(ROWS, size.width, dtype=dtype)
        if turn == 2:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        barrier(mesh["dp"])
        start = _loopback()
        barrier(mesh["dp"])
        loss = module(x).float().square().mean() / mesh["dp"].size
        if begins == "backward":
            barrier(mesh["dp"])
            start = _loopback()
            barrier(mesh["dp"])
        step(loss)
        barrier(mesh["dp"])
        sent.append(_loopback() - start)
    return _resident("VmHWM") - before, min(sent[2:])


def _resident(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this benchmark runs on Linux")


def _loopback() -> float:
    """MB that the loopback device has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8]) / 2**20
    raise RuntimeError("/proc/net/dev has no lo: this benchmark runs on Linux")


def report(dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Print and return one table."""
    ranks = spawn(times, dtype, rounds, dp=2)
    found = {}
    for name in NAMES:
        slowest = [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)]
        memory, sent = zip(*spawn(costs, dtype, name, dp=2), strict=True)
        found[name] = {
            "median_ms": statistics.median(slowest) * 1e3,
            "peak_mb": max(memory),
            "sent_mb": max(sent) / 2,
        }
    print(f"\n{dtype}, 2 ranks\n{'':18}{'ms':>8}{'of DDP':>8}{'peak MB':>9}{'MB sent':>9}")
    for name, row in found.items():
        print(f"{name:<18}{row['median_ms']:>8.0f}"
              f"{row['median_ms'] / found['torch DDP']['median_ms']:>8.2f}"
              f"{row['peak_mb']:>9.0f}{row['sent_mb']:>9.0f}")  # fmt: skip
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Backward to updated parameters on two ranks.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    found: dict[str, Any] = surroundings()
    for dtype in (torch.float32, torch.bfloat16):
        found[str(dtype)] = report(dtype, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
