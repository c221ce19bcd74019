"""A layer of experts against transformers' and against a dense layer of the same active size.

Forward and backward of a layer with a softmax router on one process, in fp32 or bf16. The
contestants run in turns, in an order drawn for each round; the table shows medians of the elapsed
and of the CPU time, and how many times more CPU time each takes than ours; ``dense`` is a gated
feed-forward that is K times as wide as an expert: what routing costs. With one thread CPU time
depends little on what else the machine does. transformers' layer has our weights, and the same
outputs before anything is timed. It runs its experts as a loop (``eager``) and as one grouped
product.

With ``--ep`` ranks of one thread each share the experts: each has as many tokens as before, and
runs a layer that has all experts in turn. The bytes that leave a rank must be those of
``exchange_traffic``, 4 T K D b (ep - 1) / ep and the counts, where the load is forced to be even.

    python bench_experts.py [--rounds 7] [--threads 1] [--ep 2] [--json FILE]
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Mesh, barrier, spawn
from kenotron_dist.diagnosis import record
from kenotron_ep import ExchangeSize, exchange_traffic
from kenotron_models import Build, Context
from kenotron_models.layers import MLP, Experts, ExpertsSpec, MLPSpec, RouterSpec

SIZES = {  # experts, of a token, D, F, tokens
    "8 of 512, 2": (8, 2, 512, 1024, 1024),
    "8 of 1024, 2": (8, 2, 1024, 1792, 1024),
    "32 of 256, 4": (32, 4, 512, 256, 2048),
    "64 of 128, 8": (64, 8, 512, 128, 2048),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[], Tensor]


def layer(name: str, dtype: torch.dtype, ep: Axis | None = None, *, even: bool = False) -> Experts:
    """Our layer of a size; ``even``: experts are dealt to tokens in turn."""
    experts, top_k, width, features, _ = SIZES[name]
    torch.manual_seed(0)
    build = Build(Axis.solo("tp"), device="cpu", dtype=dtype, ep=ep or Axis.solo("ep"))
    router = RouterSpec(experts=experts, top_k=top_k, normalize=True, force_balance=even)
    return ExpertsSpec(router=router, features=features).build(width, build)


def tokens(name: str, dtype: torch.dtype) -> Tensor:
    """Tokens (T, D)."""
    _, _, width, _, count = SIZES[name]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, width, generator=generator).to(dtype).requires_grad_()


def theirs(ours: Experts, name: str, dtype: torch.dtype, how: str) -> nn.Module:
    """transformers' layer of a Mixtral with our weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts, top_k, width, features, _ = SIZES[name]
    config = MixtralConfig(
        hidden_size=width, intermediate_size=features, num_local_experts=experts,
        num_experts_per_tok=top_k, experts_implementation=how,
    )  # fmt: skip
    block = MixtralSparseMoeBlock(config).to(dtype)
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(ours.first.weight)
        block.experts.down_proj.copy_(ours.down.weight)
    return block


def contestants(name: str, dtype: torch.dtype) -> dict[str, tuple[Run, nn.Module]]:
    """What is compared: a forward each, and the module whose parameters get gradients."""
    _, top_k, width, features, count = SIZES[name]
    x, ours = tokens(name, dtype), layer(name, dtype)
    context = Context(torch.arange(count).view(1, -1))
    build = Build(Axis.solo("tp"), device="cpu", dtype=dtype)
    dense = MLP(MLPSpec(features=top_k * features), width, build)
    found: dict[str, tuple[Run, nn.Module]] = {
        "ours": (lambda: ours(x, context), ours),
        "dense": (lambda: dense(x), dense),
    }
    for how in ("eager", "grouped_mm"):
        block = theirs(ours, name, dtype, how)
        found[f"transformers, {how}"] = (lambda block=block: block(x[None])[0], block)
    wanted = found["ours"][0]()
    for other in (key for key in found if key.startswith("transformers")):
        check_outputs(other, found[other][0]().detach(), wanted.detach())
    return found


def check_outputs(other: str, y: Tensor, wanted: Tensor) -> None:
    """Raise RuntimeError where outputs (T, D) differ by more than rounding.

    A bf16 router of theirs sends some tokens elsewhere: at most one in 20.
    """
    bound, most = (1e-4, 0) if y.dtype == torch.float32 else (5e-2, len(y) // 20)
    wrong = (y - wanted).abs().amax(-1) > bound * wanted.abs().max()
    if int(wrong.sum()) > most:
        raise RuntimeError(f"{other} computes something else for {int(wrong.sum())} tokens")


def in_turns(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median elapsed and CPU seconds of each step, after two rounds to warm up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order = list(steps)
    for turn in range(rounds + 2):
        random.shuffle(order)
        for name in order:
            begin, busy = time.perf_counter(), time.process_time()
            steps[name]()
            if turn >= 2:
                taken[name].append((time.perf_counter() - begin, time.process_time() - busy))
    return {
        name: {
            "seconds": round(statistics.median(elapsed for elapsed, _ in each), 4),
            "cpu_seconds": round(statistics.median(busy for _, busy in each), 4),
        }
        for name, each in taken.items()
    }


def step_of(run: Run, module: nn.Module) -> Callable[[], object]:
    """A forward and backward; gradients begin at nothing."""

    def step() -> None:
        module.zero_grad()
        run().sum().backward()

    return step


def shared(mesh: Mesh, name: str, rounds: int) -> dict[str, float]:
    """Median seconds of a forward and backward of this rank's tokens, and bytes that it sends."""
    torch.set_num_threads(1)
    x, ep = tokens(name, torch.float32), mesh["ep"]
    context = Context(torch.arange(len(x)).view(1, -1))
    layers = {f"ep {axis.size}": layer(name, torch.float32, axis) for axis in (Axis.solo("ep"), ep)}
    seconds: dict[str, list[float]] = {who: [] for who in layers}
    for _ in range(rounds + 2):
        for who, ours in layers.items():
            ours.zero_grad()
            barrier(mesh.world)
            begin = time.perf_counter()
            ours(x, context).sum().backward()
            barrier(mesh.world)
            seconds[who].append(time.perf_counter() - begin)
    medians = {who: round(statistics.median(taken[2:]), 4) for who, taken in seconds.items()}
    return medians | {"bytes": sent(mesh, name)}


def sent(mesh: Mesh, name: str) -> int:
    """Bytes of tokens, results and gradients that leave this rank where the load is even.

    Raises RuntimeError where they are not those of the formula.
    """
    experts, top_k, width, _, count = SIZES[name]
    x, ours = tokens(name, torch.float32), layer(name, torch.float32, mesh["ep"], even=True)
    with record(mesh) as recorder:
        ours(x, Context(torch.arange(count).view(1, -1))).sum().backward()
        counted = recorder.bytes_per_axis()["ep"]
    size = ExchangeSize(count, top_k, width, experts, torch.float32)
    plan, forward, backward = exchange_traffic(size, mesh["ep"].size)
    if counted != plan + forward + backward:
        raise RuntimeError(f"{name}: {counted} bytes, the formula: {plan} + {forward + backward}")
    return int(forward + backward)


def measured_ep(ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Print and return the figures of layers that ranks share."""
    print(f"\nfp32, one thread a rank: ep {ranks} and ranks that have all experts, same tokens")
    found = {}
    for name in SIZES:
        each = spawn(shared, name, rounds, dp=ranks, ep=ranks)
        found[name] = {who: max(rank[who] for rank in each) for who in each[0]}
        one, several, moved = found[name].values()
        print(
            f"{name:14} {1e3 * one:8.1f} ms {1e3 * several:8.1f} ms {several / one:5.2f} "
            f"{moved / 2**20:7.1f} MB sent"
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts; 1: none")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = about(options.threads, options.rounds)
    print("| dtype | experts | contestant | ms | CPU ms | times ours |\n|---|---|---|---|---|---|")
    for kind, dtype in DTYPES.items():
        for name in SIZES:
            steps = {who: step_of(*each) for who, each in contestants(name, dtype).items()}
            medians = found[f"{kind} {name}"] = in_turns(steps, options.rounds)
            for who, each in medians.items():
                ms, cpu = 1e3 * each["seconds"], 1e3 * each["cpu_seconds"]
                times = each["cpu_seconds"] / medians["ours"]["cpu_seconds"]
                print(
                    f"| {kind} | {name} | {who} | {ms:.0f} | {cpu:.0f} | {times:.2f} |", flush=True
                )
    if options.ep > 1:
        found["fp32, one thread a rank"] = measured_ep(options.ep, options.rounds)
    found["load average at the end"] = round(os.getloadavg()[0], 1)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def about(threads: int, rounds: int) -> dict[str, Any]:
    """What the figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"), "commit": commit, "torch": torch.__version__,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "threads": threads, "rounds": rounds,
        "load average at the start": round(os.getloadavg()[0], 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
