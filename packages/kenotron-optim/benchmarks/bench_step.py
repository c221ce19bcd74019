"""From the start of the last backward to updated parameters: this package against torch's own.

Two data-parallel processes and a plain network with the tensor sizes of a small decoder. torch's
side is DDP, ``clip_grad_norm_`` and fused AdamW, with and without ``ZeroRedundancyOptimizer``; ours
is the accumulator, the norm, clipping and the sliced optimizer at ZeRO stages 0 and 1. Forward is
not timed. In every round each contestant runs once, after a barrier; a round counts as long as its
slowest rank, and the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from kenotron_dist import Mesh, barrier, named_parameters, parameter_layouts, spawn
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, clip_, decay_groups

WIDTH, INNER, LAYERS, ROWS = 256, 688, 13, 64  # 10.3 M parameters; rows of one rank's batch
WARM_UP = 3
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
Step = Callable[[Tensor], None]
"""Does everything that follows the loss."""


class Block(nn.Module):
    """The matrices of a decoder layer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm, self.gate_up = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, WIDTH) -> (N, WIDTH)."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(q * k.tanh() + v)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def ours(mesh: Mesh, model: nn.Module, stage: int) -> tuple[nn.Module, Step]:
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    norm = GlobalNorm(grads)
    groups = decay_groups(grads.names, ADAMW["weight_decay"])
    optimizer = SlicedOptimizer(grads, lambda g: torch.optim.AdamW(g, **ADAMW), groups, stage)

    def step(loss: Tensor) -> None:
        grads.start()
        loss.backward()
        slices = grads.finish()
        clip_(slices, 1.0, norm(slices))
        optimizer.step(slices, ADAMW["lr"])

    return model, step


def theirs(model: nn.Module, zero: bool) -> tuple[nn.Module, Step]:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if zero:
        optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(parallel.parameters(), **ADAMW)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()

    return parallel, step


def measure(mesh: Mesh, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round on this rank, by contestant."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    copies = iter([copy.deepcopy(model) for _ in range(4)])
    contestants = {
        "ours, ZeRO 0": ours(mesh, next(copies), 0),
        "torch DDP": theirs(next(copies), zero=False),
        "ours, ZeRO 1": ours(mesh, next(copies), 1),
        "torch DDP + ZeRO": theirs(next(copies), zero=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(WARM_UP + rounds):
        x = torch.randn(ROWS, WIDTH)
        for name in names[turn % 4 :] + names[: turn % 4]:
            module, step = contestants[name]
            loss = module(x).square().mean() / 2
            barrier(mesh["dp"])
            start = time.perf_counter()
            step(loss)
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return times


def surroundings() -> dict[str, Any]:
    """Hardware, versions and commit that the figures belong to."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit}
    return {"system": platform.platform(), "cores": os.cpu_count(), **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description="Backward to updated parameters on two ranks.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    ranks = spawn(measure, options.rounds, dp=2)
    times = {n: [max(pair) for pair in zip(*(r[n] for r in ranks), strict=True)] for n in ranks[0]}
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    print(f"{'contestant':<18} {'median ms':>9}  of torch DDP")
    for name, median in medians.items():
        print(f"{name:<18} {median * 1e3:>9.1f} {median / medians['torch DDP']:>12.2f}")
    if options.json:
        found = {**surroundings(), "median_s": medians}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
