"""Train an ``nn.Sequential`` that one process cannot hold, on four that share its parts (ZeRO-3).

Each process may take less memory than all parameters need.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch
from torch import nn

from kenotron_dist import Mesh, spawn
from kenotron_dist.placement import materialize, named_parameters, parameter_layouts
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, clip_, decay_groups

WIDTH, LAYERS, STEPS, ROOM = 1024, 48, 3, 0.85
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)  # 201 MB in fp32


def limit(share: float) -> None:
    """Let this process take so much more memory, in that of all parameters."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back at once
    status = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    most = now + int(share * 4 * PARAMETERS)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def fill(layer: nn.Module) -> None:
    """Give a layer its first values, the same on every rank."""
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5)


def train(mesh: Mesh) -> list[float]:
    """Return the loss of each step; a rank keeps masters and gradients of a quarter."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # imports what a first step does
    limit(ROOM)
    try:
        torch.empty(PARAMETERS)
    except RuntimeError:  # more than there is
        pass
    else:
        raise AssertionError("this process can hold the whole model")
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    layouts = parameter_layouts(model, mesh.sizes)
    materialize(model, mesh.device, memory=lambda _: False)
    grads = GradAccumulator(
        named_parameters(model), layouts, mesh, reduce="micro_batch", bucket_mb=4
    )
    norm = GlobalNorm(grads)
    optimizer = SlicedOptimizer(grads, torch.optim.SGD, decay_groups(grads.names, 0.0), stage=3)
    optimizer.overlap_forward(model, fill)
    torch.manual_seed(mesh["dp"].rank)
    x = torch.randn(8, WIDTH)
    losses = []
    for _ in range(STEPS):
        grads.start(backwards=1)
        loss = (model(x) - x).square().mean() / mesh["dp"].size
        loss.backward()
        slices = grads.finish()
        clip_(slices, 1.0, norm(slices))
        optimizer.step(slices, lr=0.3)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for rank, losses in enumerate(spawn(train, dp=4)):
        print(f"rank {rank}:", " ".join(f"{loss:.4f}" for loss in losses))
        assert losses[-1] < losses[0]
