"""Attention over a cut sequence against torch's on one process, with the same work for each core.

**Time.** Two ranks attend over S tokens by each way. The contestant ``one process`` is
``scaled_dot_product_attention`` on the whole sequence with half of the heads, on both ranks at the
same time: as much work for each core, and nothing is communicated. Contestants take turns in an
order drawn for the round; a round counts as long as its slowest rank, and the table shows medians.
``ideal`` is the median of ``one process`` divided by the contestant's: the share of its speed that
is left. ``busy`` is the same ratio of CPU seconds of both ranks, the backend's threads included; it
depends less on what else the machine does.

**Bytes.** What the recorder counts on each rank is compared with ``attention_traffic``; a
difference is an error.

**Memory.** The largest number of bytes that a rank's forward and backward hold beyond the inputs,
by way and number of ranks: of one attention, or (``--layers 8``) of a small model. The kernel makes
its results and computes nothing, so that long sequences take seconds. ``share`` is that of one
rank, ideally 1/c.

The defaults take four minutes on two quiet cores. Time grows with the square of S: 32,768 tokens
take ten minutes more (``--sequences 32768``), and 65,536 forty, or twelve with ``--rounds 1``.
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
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cp_memory import HOLLOW, HeldBytes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kenotron_cp import AttentionSize, Cut, Kernel, Visibility, attend, attention_traffic
from kenotron_dist import Mesh, barrier, spawn
from kenotron_dist.diagnosis import record

WAYS = ("ring", "gather", "ulysses")
ALONE = "one process"


class Sizes(NamedTuple):
    """Sizes of an attention."""

    sequence: int
    heads: int
    kv_heads: int
    depth: int
    dtype: torch.dtype

    def drawn(self, tokens: int, heads: int, kv_heads: int) -> list[Tensor]:
        """q, k, v and a gradient."""
        shapes = [heads, kv_heads, kv_heads, heads]
        return [torch.randn(1, tokens, h, self.depth, dtype=self.dtype) for h in shapes]


class Found(NamedTuple):
    """What one rank measured of a contestant: seconds of every round, and bytes sent."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    sent: int = 0


Step = Callable[[Callable[[], None]], None]


def ours(mesh: Mesh, sizes: Sizes, way: Any, kernel: Kernel | None = None) -> Step:
    """Forward and backward of ``attend``; calls its argument between them."""
    axis, sight = mesh["cp"], Visibility(sizes.sequence)
    q, k, v, grad = sizes.drawn(Cut(sizes.sequence, axis.size).local, sizes.heads, sizes.kv_heads)

    def step(between: Callable[[], None]) -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, axis, sight, way=way, kernel=kernel)
        between()
        out.backward(grad)

    return step


def alone(mesh: Mesh, sizes: Sizes) -> Step:
    """The whole sequence with this rank's share of the heads."""
    c = mesh["cp"].size
    kv_heads = max(1, sizes.kv_heads // c)
    drawn = sizes.drawn(sizes.sequence, sizes.heads // c, kv_heads)
    q, k, v, grad = (x.transpose(1, 2).contiguous() for x in drawn)

    def step(between: Callable[[], None]) -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        between()
        out.backward(grad)

    return step


def small_model(mesh: Mesh, sizes: Sizes, way: Any, layers: int) -> Step:
    """Forward and backward of layers of attention and of a feed-forward of twice the width.

    Parameters count as inputs, their gradients do not.
    """
    axis, sight, width = mesh["cp"], Visibility(sizes.sequence), sizes.heads * sizes.depth
    x, grad = torch.randn(2, 1, Cut(sizes.sequence, axis.size).local, width, dtype=sizes.dtype)
    shapes = [(width, 3 * width), (width, width), (width, 2 * width), (2 * width, width)]
    parameters = [
        [(torch.randn(shape, dtype=sizes.dtype) / 20).requires_grad_() for shape in shapes]
        for _ in range(layers)
    ]

    def step(between: Callable[[], None]) -> None:
        h = x
        for inner, outer, up, down in parameters:
            q, k, v = (h @ inner).unflatten(-1, (3, sizes.heads, sizes.depth)).unbind(2)
            h = h + attend(q, k, v, axis, sight, way=way, kernel=HOLLOW).flatten(2) @ outer
            h = h + (h @ up).relu() @ down
        between()
        h.backward(grad)

    return step


def check_bytes(mesh: Mesh, sizes: Sizes, way: str, step: Step) -> int:
    """Bytes that leave this rank. Raises RuntimeError where the formula gives others."""
    counted = []
    with record(mesh) as recorder:
        step(lambda: counted.append(sum(entry.sent for entry in recorder.cut())))
        counted.append(sum(entry.sent for entry in recorder.cut()))
    axis, cut = mesh["cp"], Cut(sizes.sequence, mesh["cp"].size)
    depth = sizes.depth
    size = AttentionSize(1, sizes.heads, sizes.kv_heads, depth, depth, sizes.dtype)
    expected = attention_traffic(way, size, Visibility(sizes.sequence), cut, axis.rank)
    if tuple(counted) != expected:
        raise RuntimeError(f"{way}: sent {counted} bytes, the formula says {expected}")
    return sum(counted)


def measure(mesh: Mesh, sizes: Sizes, rounds: int) -> dict[str, Found]:
    """Seconds of forward and backward on this rank, by contestant."""
    steps = {ALONE: alone(mesh, sizes)} | {way: ours(mesh, sizes, way) for way in WAYS}
    parts = ("forward", "backward", "both")
    found = {name: Found({p: [] for p in parts}, {p: [] for p in parts}) for name in steps}
    for way in WAYS:  # the first step of each also warms up
        found[way] = found[way]._replace(sent=check_bytes(mesh, sizes, way, steps[way]))
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(steps), len(steps)):
            barrier(mesh["cp"])
            times = {clock: [read()] for clock, read in clocks.items()}

            def note(times: dict[str, list[float]] = times) -> None:
                for clock, read in clocks.items():
                    times[clock].append(read())

            steps[name](note)
            note()
            for clock, (begin, middle, end) in times.items():
                seconds = getattr(found[name], clock)
                seconds["forward"].append(middle - begin)
                seconds["backward"].append(end - middle)
                seconds["both"].append(end - begin)
    return found


def peak(mesh: Mesh, sizes: Sizes, way: str, layers: int) -> int:
    """Bytes that a step holds at most, beyond its inputs. 0 layers: of attention alone."""
    step = small_model(mesh, sizes, way, layers) if layers else ours(mesh, sizes, way, HOLLOW)
    with HeldBytes() as held:
        step(lambda: None)
    return held.most


def show_times(sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """Print and return the table of one size."""
    ranks = spawn(measure, sizes, rounds, cp=2)

    def median(name: str, clock: str, part: str) -> float:
        combine = max if clock == "wall" else sum
        each = zip(*(getattr(rank[name], clock)[part] for rank in ranks), strict=True)
        return statistics.median(map(combine, each))

    rows = []
    print(f"\nS {sizes.sequence}, {sizes.heads} heads, {sizes.kv_heads} key heads of {sizes.depth}")
    print(f"{'':<12} forward s backward s  ideal   busy    sent MB")
    for name in (ALONE, *WAYS):
        walls, cpus = ([median(n, c, "both") for n in (ALONE, name)] for c in ("wall", "cpu"))
        row = {
            "contestant": name,
            "forward_s": median(name, "wall", "forward"),
            "backward_s": median(name, "wall", "backward"),
            "ideal": walls[0] / walls[1],
            "busy": cpus[0] / cpus[1],
            "sent_bytes": max(rank[name].sent for rank in ranks),
        }
        rows.append(row)
        print(
            f"{name:<12} {row['forward_s']:>9.3f} {row['backward_s']:>10.3f} {row['ideal']:>6.2f} "
            f"{row['busy']:>6.2f} {row['sent_bytes'] / 2**20:>10.2f}"
        )
    return rows


def show_memory(sizes: Sizes, way: str, ranks: list[int], layers: int) -> list[dict[str, Any]]:
    """Print and return the peak of a rank by number of ranks."""
    rows: list[dict[str, Any]] = []
    what = f"{layers} layers" if layers else "attention"
    shape = f"{sizes.heads} heads of {sizes.depth}"
    print(f"\npeak of a rank, {way}, {what}, S {sizes.sequence}, {shape}")
    for c in ranks:
        most = max(spawn(peak, sizes, way, layers, cp=c))
        share = most / rows[0]["peak_bytes"] if rows else 1.0
        rows.append({"cp": c, "peak_bytes": most, "share": share})
        print(f"cp {c}: {most / 2**20:>8.1f} MB, share {share:.3f}, 1/c {1 / c:.3f}")
    return rows


def commit() -> str:
    """Commit of the working tree."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention over a cut sequence.")
    parser.add_argument("--sequences", nargs="*", type=int, default=[4096, 8192, 16_384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, default=16_384, help="tokens; 0: not measured")
    parser.add_argument("--memory-ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=0, help="memory of a model; 0: of attention")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for each rank
    dtype = getattr(torch, options.dtype)
    figures: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    for sequence in options.sequences:
        sizes = Sizes(sequence, options.heads, options.kv_heads, options.depth, dtype)
        figures[f"S {sequence}"] = show_times(sizes, options.rounds)
    if options.memory:
        sizes = Sizes(options.memory, 8, 8, 32, dtype)
        for way in WAYS:
            name = f"memory {options.memory}, {way}, {options.layers} layers"
            figures[name] = show_memory(sizes, way, options.memory_ranks, options.layers)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
