"""torch's own pipeline schedules as an independent source of losses and gradients."""

from __future__ import annotations

import pytest
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
from kenotron_dist.testing import on_ranks
from kenotron_pp import (
    Pipeline,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)

pytestmark = pytest.mark.gloo(reason="torch's engine hangs over a process group in Python")
WIDTH, ROWS, MICROBATCHES = 8, 4, 6


class Stage(PipelineStage):
    """torch's, that opens no connection to its own rank: torch 2.11 does in a V, gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        own = self.group_rank
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]


def chunks_of(mesh: Mesh, schedule: Schedule) -> list[nn.Sequential]:
    """This rank's chunks of four small stages."""
    torch.manual_seed(0)
    ranks = mesh["pp"].size
    stages = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        for _ in range(ranks * schedule.chunks)
    ]
    return [
        stages[schedule.stage(mesh["pp"].rank, chunk, ranks)] for chunk in range(schedule.chunks)
    ]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def compare(mesh: Mesh, ours: Schedule, theirs: type) -> float:
    """Largest difference of a gradient or a loss between the two engines."""
    x = torch.randn(MICROBATCHES, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    target = x.roll(1, 0)
    axis = mesh["pp"]
    own = chunks_of(mesh, ours)
    pipeline = Pipeline(own if ours.chunks > 1 else own[0], axis, ours, pairs=mesh.pairs("pp"))
    pipeline.run(list(x), lambda y, m: loss_of(y, target[m]))

    other = chunks_of(mesh, ours)
    stages = [
        Stage(
            chunk,
            ours.stage(axis.rank, i, axis.size),
            axis.size * ours.chunks,
            torch.device("cpu"),
            group=axis.group,
        )
        for i, chunk in enumerate(other)
    ]
    single = ours.chunks == 1
    engine = theirs(
        stages[0] if single else stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False
    )
    losses: list[Tensor] = []
    feed = (x.flatten(0, 1),) if axis.rank == 0 else ()
    last = {"target": target.flatten(0, 1), "losses": losses} if pipeline.is_last else {}
    engine.step(*feed, **last)
    worst = 0.0
    for mine, their in zip(own, other, strict=True):
        for one, two in zip(mine.parameters(), their.parameters(), strict=True):
            worst = max(worst, (one.grad - two.grad).abs().max().item())
    if losses and pipeline.losses:
        worst = max(worst, abs(float(sum(losses)) - float(pipeline.losses.total)) / 100)
    return worst


@pytest.mark.filterwarnings("ignore")  # torch's, about its own names
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (gpipe, ScheduleGPipe),
        (one_f_one_b, Schedule1F1B),
        (interleaved(2), ScheduleInterleaved1F1B),
        (zero_bubble_h1, Schedule1F1B),
        (zero_bubble_v, ScheduleZBVZeroBubble),
    ],
    ids=["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"],
)
def test_torchs_schedules_find_the_same_gradients(ours: Schedule, theirs: type) -> None:
    assert max(on_ranks(compare, ours, theirs, pp=2)) < 1e-5
