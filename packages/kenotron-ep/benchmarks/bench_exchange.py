"""Dispatch and combine on two ranks, against one rank and against code without a package.

**Time.** Forward and backward of the exchange alone: experts return their rows. Each rank has T
tokens, so there is as much work for each core on one rank and on two.

- ``index, one rank``: a loop over experts that selects tokens by a mask and adds results with
  ``index_add``, as the eager code of model libraries does;
- ``one rank``: ``mix_experts`` without communication;
- ``gather, two ranks``: the loop over tokens that are all-gathered; results are reduce-scattered;
- ``alltoall``, ``once_per_rank``, ``allgather``, ``2 chunks``: ``mix_experts`` on two ranks.

Both ranks run a contestant at the same time. Contestants take turns in an order drawn for the
round; a round counts as long as its slowest rank, and the table shows medians. ``busy`` is CPU time
of a rank, the backend's threads included; it depends less on what else the machine does.

**Bytes.** What the recorder counts on each rank is compared with ``planned_traffic``; a difference
is an error. ``balanced`` is the share of the 4 T K D b (n-1)/n bytes of a balanced router.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron_dist import Axis, Mesh, barrier, spawn
from kenotron_dist.autograd import all_gather_from, reduce_scatter_to
from kenotron_dist.diagnosis import record
from kenotron_ep import (
    ExchangeSize,
    exchange_traffic,
    mix_experts,
    plan_exchange,
    planned_traffic,
)

WAYS = ("alltoall", "once_per_rank", "allgather")
Step = Callable[[Tensor, Tensor], Tensor]


class Drawn(NamedTuple):
    """Tokens of this rank."""

    x: Tensor
    chosen: Tensor
    weights: Tensor


def drawn(size: ExchangeSize, rank: int) -> Drawn:
    """Tokens, K different experts of each, weights."""
    torch.manual_seed(rank)
    scores = torch.randn(size.tokens, size.experts)
    weights, chosen = scores.softmax(-1).topk(size.top_k)
    return Drawn(torch.randn(size.tokens, size.features).to(size.dtype), chosen, weights)


def loop(x: Tensor, chosen: Tensor, weights: Tensor, experts: range) -> Tensor:
    """Results of some experts, added token by token: what one writes first."""
    out = torch.zeros_like(x)
    for expert in experts:
        tokens, k = torch.where(chosen == expert)
        results = x[tokens]
        out = out.index_add(0, tokens, results * weights[tokens, k, None].to(x.dtype))
    return out


def contestants(mesh: Mesh, size: ExchangeSize, own: Drawn) -> dict[str, Step]:
    """Forward passes by name, as functions of tokens and weights."""
    axis, solo = mesh["ep"], Axis.solo("ep")
    experts, chosen = size.experts, own.chosen
    local = experts // axis.size
    mine = range(axis.rank * local, (axis.rank + 1) * local)

    def mixed(axis: Axis, **options: Any) -> Step:
        def step(x: Tensor, weights: Tensor) -> Tensor:
            return mix_experts(x, chosen, weights, experts, axis, lambda r, _: r, **options)

        return step

    def gathered(x: Tensor, weights: Tensor) -> Tensor:
        parts = (all_gather_from(each, axis, 0) for each in (x, chosen, weights))
        return reduce_scatter_to(loop(*parts, mine), axis, 0)

    return {
        "index, one rank": lambda x, w: loop(x, chosen, w, range(experts)),
        "one rank": mixed(solo),
        "gather, two ranks": gathered,
        **{way: mixed(axis, way=way) for way in WAYS},
        "2 chunks": mixed(axis, chunks=2),
    }


def check_bytes(mesh: Mesh, size: ExchangeSize, own: Drawn, way: Any, step: Step) -> int:
    """Bytes of tokens, results and gradients that leave this rank.

    Raises RuntimeError where the formula gives others.
    """
    with record(mesh) as recorder:
        leaves = own.x.clone().requires_grad_(), own.weights.clone().requires_grad_()
        step(*leaves).sum().backward()
        counted = recorder.bytes_per_axis()["ep"]
    exchange = plan_exchange(own.chosen, size.experts, mesh["ep"], way=way)
    expected = planned_traffic(exchange, size.features, size.dtype)
    if counted != sum(expected):
        raise RuntimeError(f"{way}: sent {counted} bytes, the formula says {sum(expected)}")
    return counted - int(expected.plan)


def measure(mesh: Mesh, size: ExchangeSize, rounds: int) -> dict[str, Any]:
    """Seconds of forward, backward and of the CPU in each round, and bytes, by contestant."""
    own = drawn(size, mesh["ep"].rank)
    grad = torch.randn_like(own.x)
    steps = contestants(mesh, size, own)
    sent = {way: check_bytes(mesh, size, own, way, steps[way]) for way in WAYS}
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
    for turn in range(rounds + 1):  # the first one warms up
        for name in random.Random(turn).sample(list(steps), len(steps)):
            leaves = own.x.clone().requires_grad_(), own.weights.clone().requires_grad_()
            barrier(mesh["ep"])
            busy, begin = time.process_time(), time.perf_counter()
            out = steps[name](*leaves)
            middle = time.perf_counter()
            out.backward(grad)
            end, busy = time.perf_counter(), time.process_time() - busy
            if turn:
                seconds[name].append((middle - begin, end - middle, busy))
    return {"seconds": seconds, "sent": sent}


def show(size: ExchangeSize, rounds: int) -> list[dict[str, Any]]:
    """Print and return the table of one size."""
    ranks = spawn(measure, size, rounds, dp=2, ep=2)
    balanced = sum(exchange_traffic(size, 2)[1:])
    rows = []
    print(
        f"\nT {size.tokens} a rank, K {size.top_k}, D {size.features}, E {size.experts}, "
        f"{str(size.dtype).removeprefix('torch.')}"
    )
    print(f"{'':<18} forward ms backward ms   both ms   busy ms   sent MB balanced")
    for name in ranks[0]["seconds"]:
        turns = list(zip(*(rank["seconds"][name] for rank in ranks), strict=True))
        parts = [[max(rank[i] for rank in turn) for turn in turns] for i in (0, 1)]
        both = [max(sum(rank[:2]) for rank in turn) for turn in turns]
        busy = [statistics.mean(rank[2] for rank in turn) for turn in turns]
        sent = max(rank["sent"].get(name, 0) for rank in ranks)
        row = {
            "contestant": name,
            "forward_ms": 1e3 * statistics.median(parts[0]),
            "backward_ms": 1e3 * statistics.median(parts[1]),
            "both_ms": 1e3 * statistics.median(both),
            "busy_ms": 1e3 * statistics.median(busy),
            "sent_bytes": sent,
            "balanced": sent / balanced,
        }
        rows.append(row)
        shown = f"{sent / 2**20:>9.2f} {sent / balanced:>8.3f}" if sent else ""
        print(
            f"{name:<18} {row['forward_ms']:>10.1f} {row['backward_ms']:>11.1f} "
            f"{row['both_ms']:>9.1f} {row['busy_ms']:>9.1f} {shown}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Dispatch and combine.")
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for each rank
    dtype = getattr(torch, options.dtype)
    figures: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    for top_k in options.top_k:
        size = ExchangeSize(options.tokens, top_k, options.features, options.experts, dtype)
        figures[f"K {top_k}"] = show(size, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
