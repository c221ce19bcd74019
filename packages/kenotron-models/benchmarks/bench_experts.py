"""A layer of experts against transformers' and against a dense layer of the same active size.

Forward and backward of a layer with a softmax router on one process, in fp32 or bf16. The
contestants run in turns, in an order drawn for each round; the table shows medians, how many times
longer each takes than ours, and ours over a dense gated feed-forward that is K times as wide as an
expert: what routing costs. All have the same weights, and the same outputs before anything is
timed. transformers runs its experts as a loop (``eager``) and as one grouped product.

With ``--ep`` ranks of one thread each share the experts: each has as many tokens as before.

    python bench_experts.py [--rounds 7] [--ep 2] [--json FILE]
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
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Mesh, barrier, spawn
from kenotron_models import MLP, Build, Context, Experts, ExpertsSpec, MLPSpec, RouterSpec

SIZES = {  # experts, of a token, D, F, tokens
    "8 of 512, 2": (8, 2, 512, 1024, 1024),
    "8 of 1024, 2": (8, 2, 1024, 1792, 1024),
    "32 of 256, 4": (32, 4, 512, 256, 2048),
    "64 of 128, 8": (64, 8, 512, 128, 2048),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[], Tensor]


def layer(name: str, dtype: torch.dtype, ep: Axis | None = None) -> Experts:
    """Our layer of a size."""
    experts, top_k, width, features, _ = SIZES[name]
    torch.manual_seed(0)
    build = Build(Axis.solo("tp"), device="cpu", dtype=dtype, ep=ep or Axis.solo("ep"))
    router = RouterSpec(experts=experts, top_k=top_k, normalize=True)
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
        bound = 1e-4 if dtype == torch.float32 else 3e-2
        deviation = (found[other][0]() - wanted).abs().max() / wanted.abs().max()
        if deviation > bound:
            raise RuntimeError(f"{other} computes something else: {deviation:.1e}")
    return found


def in_turns(runs: dict[str, tuple[Run, nn.Module]], rounds: int) -> dict[str, float]:
    """Median seconds of a forward and backward, after two rounds to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for turn in range(rounds + 2):
        random.shuffle(order)
        for name in order:
            run, module = runs[name]
            module.zero_grad()
            begin = time.perf_counter()
            run().sum().backward()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def shared(mesh: Mesh, name: str, rounds: int) -> float:
    """Median seconds of a forward and backward of this rank's tokens."""
    torch.set_num_threads(1)
    x, ours = tokens(name, torch.float32), layer(name, torch.float32, mesh["ep"])
    context = Context(torch.arange(len(x)).view(1, -1))
    taken = []
    for _ in range(rounds + 2):
        ours.zero_grad()
        barrier(mesh.world)
        begin = time.perf_counter()
        ours(x, context).sum().backward()
        barrier(mesh.world)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts; 1: none")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    found: dict[str, Any] = {
        "machine": platform.machine(), "torch": torch.__version__, "threads": threads,
    }  # fmt: skip
    for kind, dtype in DTYPES.items():
        print(f"\n{kind}, {threads} threads\n\n| experts | contestant | ms | times ours |")
        print("|---|---|---|---|")
        for name in SIZES:
            medians = in_turns(contestants(name, dtype), options.rounds)
            found[f"{kind} {name}"] = medians
            for who, seconds in medians.items():
                print(f"| {name} | {who} | {1e3 * seconds:.1f} | {seconds / medians['ours']:.2f} |")
    if options.ep > 1:
        print(f"\nfp32, one thread a rank: ep {options.ep} over as many ranks alone, same tokens")
        for name in SIZES:
            one, several = (
                max(spawn(shared, name, options.rounds, dp=options.ep, ep=ep))
                for ep in (1, options.ep)
            )
            found[f"ep {name}"] = {"ep 1": one, f"ep {options.ep}": several}
            print(f"{name:14} {1e3 * one:8.1f} ms {1e3 * several:8.1f} ms {several / one:5.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
