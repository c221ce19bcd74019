"""Who runs the steps: this package, torch.distributed.pipelining, and 1F1B written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from kenotron_dist import Mesh
from kenotron_pp import SCHEDULES, Pipeline, Schedule, Stages

THEIRS: dict[str, Any] = {
    "afab": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
Sizes = tuple[int, int, int]
"""(width, layers, rows of a micro-batch)"""
TINY: Sizes = (8, 4, 1)
LARGE: Sizes = (512, 8, 128)
Step = Callable[[], Any]


class Block(nn.Module):
    """Norm and a gated network: (N, width) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) -> (N, width)."""
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Tiny(nn.Linear):
    """Hardly anything: (N, width) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)


def model(sizes: Sizes) -> list[tuple[str, nn.Module]]:
    """The same layers for everybody."""
    torch.manual_seed(0)
    kind = Tiny if sizes == TINY else Block
    return [(str(i), kind(sizes[0])) for i in range(sizes[1])]


def batch(sizes: Sizes, microbatches: int) -> Tensor:
    """(M, rows, width), inputs and targets at once."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(microbatches, sizes[2], sizes[0], generator=generator)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """Mean square of the differences."""
    return (y - target).square().mean()


def chunks_of(mesh: Mesh, sizes: Sizes, schedule: Schedule) -> list[list[nn.Module]]:
    """This rank's layers, equal parts of the model."""
    layers = model(sizes)
    stages = Stages.balanced(layers, [1.0] * len(layers), mesh["pp"].size, schedule)
    return [[layer for _, layer in chunk] for chunk in stages.chunks(layers, mesh["pp"].rank)]


def ours(mesh: Mesh, sizes: Sizes, name: str, x: Tensor) -> tuple[Step, Pipeline]:
    """A step of this package, and its pipeline."""
    schedule = SCHEDULES[name]
    chunks = chunks_of(mesh, sizes, schedule)
    pipeline = Pipeline(chunks if schedule.chunks > 1 else chunks[0], mesh["pp"], schedule)
    inputs = list(x)
    return lambda: pipeline.run(inputs, lambda y, m: loss_of(y, inputs[m])), pipeline


def theirs(mesh: Mesh, sizes: Sizes, name: str, x: Tensor) -> Step:
    """A step of torch's schedule."""
    schedule, axis = SCHEDULES[name], mesh["pp"]
    count = axis.size * schedule.chunks
    stages = [
        PipelineStage(
            nn.Sequential(*chunk), schedule.stage(axis.rank, i, axis.size), count,
            torch.device("cpu"), group=axis.group,
        )
        for i, chunk in enumerate(chunks_of(mesh, sizes, schedule))
    ]  # fmt: skip
    given = stages if schedule.chunks > 1 else stages[0]
    engine = THEIRS[name](given, len(x), loss_fn=loss_of, scale_grads=False)
    last = any(stage.is_last for stage in stages)
    flat = x.flatten(0, 1)
    feed = (flat,) if axis.rank == 0 else ()
    return lambda: engine.step(*feed, **({"target": flat, "losses": []} if last else {}))


def by_hand(mesh: Mesh, sizes: Sizes, x: Tensor) -> Step:
    """1F1B of two stages without any engine: what the actions and their transfers cost."""
    [layers] = chunks_of(mesh, sizes, SCHEDULES["1f1b"])
    stage, group, inputs = nn.Sequential(*layers), mesh["pp"].group, list(x)
    return (lambda: _first(stage, group, inputs)) if mesh.rank == 0 else (
        lambda: _second(stage, group, inputs)
    )  # fmt: skip


def _first(stage: nn.Module, group: Any, inputs: list[Tensor]) -> None:
    outputs: list[Tensor] = []
    sent = []

    def forward(m: int) -> None:
        outputs.append(stage(inputs[m]))
        sent.append(dist.isend(outputs[m].detach(), 1, group=group, tag=2 * m))

    forward(0)
    for m in range(len(inputs)):
        dy = torch.empty_like(outputs[m])
        work = dist.irecv(dy, 1, group=group, tag=2 * m + 1)
        if m + 1 < len(inputs):
            forward(m + 1)
        _wait(work)
        _wait(sent[m])
        outputs[m].backward(dy)


def _second(stage: nn.Module, group: Any, inputs: list[Tensor]) -> None:
    x = torch.empty_like(inputs[0])
    work, sent = dist.irecv(x, 0, group=group, tag=0), []
    for m, target in enumerate(inputs):
        _wait(work)
        here = x.requires_grad_()
        if m + 1 < len(inputs):
            x = torch.empty_like(target)
            work = dist.irecv(x, 0, group=group, tag=2 * m + 2)
        loss_of(stage(here), target).backward()
        assert here.grad is not None  # it entered the loss
        sent.append(dist.isend(here.grad, 0, group=group, tag=2 * m + 1))
    for each in sent:
        _wait(each)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
