"""The back ends of attention side by side: time of a forward and a backward pass.

Each round runs all of them in turn, so that a busy machine slows all alike; medians are printed,
in milliseconds, and how many times faster than torch's own attention (sdpa) each is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from kenotron_cp import Scoring
from kenotron_models import Context
from kenotron_models.attention_backends import BACKENDS, Attend, chosen
from kenotron_models.attention_flash import flash_runs
from kenotron_models.attention_mask import AttentionMask

SIZES = (  # B, S, H, G, K
    (2, 256, 8, 8, 64),
    (2, 512, 8, 2, 64),
    (2, 1024, 16, 4, 64),
    (1, 2048, 16, 16, 64),
    (1, 2048, 32, 8, 64),
    (1, 2048, 16, 4, 128),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seen(kind: str, batch: int, sequence: int, device: str) -> AttentionMask:
    """All earlier tokens, a window of a quarter of the row, or eight documents in a row."""
    places = torch.arange(sequence, device=device).expand(batch, sequence)
    if kind == "documents":
        return AttentionMask(Context(places % (sequence // 8)), None, True)
    return AttentionMask(Context(places), sequence // 4 if kind == "window" else None)


def milliseconds(
    function: Attend, tensors: list[Tensor], sight: AttentionMask
) -> tuple[float, float]:
    """Of forward and of backward."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    times = [clock()]
    out = function(*leaves, sight, Scoring(tensors[0].shape[-1] ** -0.5))
    times.append(clock())
    out.backward(tensors[3])
    times.append(clock())
    return (times[1] - times[0]) * 1e3, (times[2] - times[1]) * 1e3


def clock() -> float:
    """Seconds, when all that was asked for is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def chosen_name(size: tuple[int, ...], dtype: str, kind: str, device: str) -> str:
    """What auto means here."""
    batch, sequence, heads, _, width = size
    q = torch.empty(batch, sequence, heads, width, device=device, dtype=DTYPES[dtype])
    return chosen(q, seen(kind, batch, sequence, device))


def measure(size: tuple[int, ...], dtype: str, kind: str, rounds: int, device: str) -> dict:
    """One line of the table."""
    batch, sequence, heads, kv_heads, width = size
    tensors = [
        torch.randn(batch, sequence, n, width, device=device, dtype=DTYPES[dtype])
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    sight = seen(kind, batch, sequence, device)
    names = ["sdpa", "blocked", *(["flash_attn"] if flash_runs(tensors[0]) else [])]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name in names:
            times[name].append(milliseconds(BACKENDS[name].attend, tensors, sight))
    medians = {
        name: [round(statistics.median(column), 2) for column in zip(*found[1:], strict=True)]
        for name, found in times.items()
    }
    ratios = {name: round(sum(medians["sdpa"]) / sum(medians[name]), 2) for name in names[1:]}
    return {
        "size": size, "dtype": dtype, "sees": kind, "milliseconds": medians, "times_sdpa": ratios,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print("| B, S, H, G, K | dtype | sees | forward + backward, ms | times sdpa | auto |")
    print("|---|---|---|---|---|---|")
    lines = []
    for kind in ("all", "window", "documents"):
        for dtype in DTYPES:
            for size in SIZES:
                line = measure(size, dtype, kind, arguments.rounds, arguments.device)
                lines.append(line)
                spent = ", ".join(
                    f"{name} {a:.1f} + {b:.1f}" for name, (a, b) in line["milliseconds"].items()
                )
                print(
                    f"| {size} | {dtype} | {kind} | {spent} | {line['times_sdpa']} "
                    f"| {chosen_name(size, dtype, kind, arguments.device)} |",
                    flush=True,
                )
    if arguments.json is not None:
        about = {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "torch": torch.__version__,
            "threads": arguments.threads,
            "lines": lines,
        }
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
