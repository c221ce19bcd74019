"""The global norm and clipping on one process: this package against torch's, 200 x 250,000 fp32.

torch's ``clip_grad_norm_`` adds squares in fp32; ours adds in fp64, which the error column shows.
Prints the best of the rounds in milliseconds, on as many threads as ``--threads`` says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_optim import GlobalNorm, GradAccumulator, clip_

TENSORS, SIZE = 200, 250_000


def milliseconds(function: Callable[[], object], rounds: int) -> float:
    """Best of some rounds after two that do not count."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    mesh = Mesh.connect()
    model = nn.ParameterDict({f"p{i:03}": torch.zeros(SIZE) for i in range(TENSORS)})
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    slices = {name: torch.randn(SIZE) for name in model}
    for name, parameter in model.items():
        parameter.grad = slices[name]
    values = list(slices.values())
    print("| norm | ours, ms | torch, ms | ours, relative error | torch |\n|---|---|---|---|---|")
    for kind in (1.0, 2.0, float("inf")):
        norm = GlobalNorm(grads, kind)
        times = [
            milliseconds(lambda norm=norm: norm(slices), arguments.rounds),
            milliseconds(lambda k=kind: nn.utils.get_total_norm(values, k), arguments.rounds),
        ]
        exact = torch.cat(values).double().norm(kind).item()
        found = norm(slices).item(), nn.utils.get_total_norm(values, kind).item()
        errors = [abs(value / exact - 1) for value in found]
        print(f"| {kind:g} | {times[0]:.1f} | {times[1]:.1f} | {errors[0]:.0e} | {errors[1]:.0e} |")
    length = GlobalNorm(grads)(slices)
    for words, limit in (("not needed", 1e9), ("needed", 0.999 * length.item())):
        spent = milliseconds(lambda x=limit: clip_(slices, x, length), arguments.rounds)
        print(f"clipping, {words}: {spent:.1f} ms")


if __name__ == "__main__":
    main()
