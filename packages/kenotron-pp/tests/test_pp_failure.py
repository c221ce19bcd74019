"""A rank that fails ends the step on all ranks, at once and with its reason."""

from __future__ import annotations

import re
import time

import pytest
import torch
from pp_models import decoder, pipeline_of, token_loss, tokens
from torch import Tensor, nn

from kenotron_dist import Mesh, all_reduce
from kenotron_dist.testing import on_ranks
from kenotron_pp import (
    Pipeline,
    PipelineError,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layer) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor):
        ctx.layer.count("backward")
        return dy, None


class Fragile(nn.Module):
    """Fails in the forward or the backward of its third micro-batch."""

    def __init__(self, inner: nn.Module, phase: str) -> None:
        super().__init__()
        self.inner, self.phase, self.seen = inner, phase, 0

    def count(self, phase: str) -> None:
        if phase == self.phase:
            self.seen += 1
            if self.seen == 3:
                raise KeyError("no such expert")

    def forward(self, x: Tensor) -> Tensor:
        self.count("forward")
        return Failing.apply(self.inner(x), self)


def fail(mesh: Mesh, schedule: Schedule, phase: str, rank: int) -> tuple[str, float, str]:
    """What this rank raised, when, and what it says when it is used again."""
    axis = mesh["pp"]
    layers = decoder(3 * axis.size + 1)
    pipeline, own = pipeline_of(layers, axis, schedule, mesh.pairs("pp"))
    pipeline.run(tokens(6), token_loss(tokens(6)))
    if axis.rank == rank:
        chunk = pipeline.chunks[0]
        chunk[-1] = Fragile(chunk[-1], phase)
    all_reduce(torch.zeros(1), axis)
    start = time.monotonic()
    try:
        pipeline.run(tokens(6), token_loss(tokens(6)))
    except PipelineError as error:
        told, seconds = str(error), time.monotonic() - start
    assert pipeline.broken and pipeline.broken in told
    with pytest.raises(PipelineError, match="this pipeline ended in an earlier step: rank"):
        pipeline.run(tokens(6), token_loss(tokens(6)))
    return told, seconds, pipeline.broken


@pytest.mark.parametrize(
    ("schedule", "phase", "rank", "pp"),
    [
        (one_f_one_b, "forward", 0, 3),
        (one_f_one_b, "forward", 2, 3),
        (one_f_one_b, "backward", 1, 3),
        (gpipe, "backward", 0, 3),
        (interleaved(2), "backward", 1, 2),
        (zero_bubble_h1, "backward", 2, 4),
        (zero_bubble_v, "forward", 1, 3),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_rank_ends_and_knows_why(schedule: Schedule, phase: str, rank: int, pp: int) -> None:
    ranks = on_ranks(fail, schedule, phase, rank, pp=pp)
    kind = {"forward": "F", "backward": "I" if schedule.splits else "B"}[phase]
    cause = f"rank {rank}, stage {rank}, micro-batch 2, action {kind}2: KeyError: 'no such expert'"
    for told, seconds, broken in ranks:
        assert broken == cause
        assert told == cause or re.match(
            re.escape(cause) + r"; so this step ended on rank \d, stage \d, micro-batch \d, "
            r"action [FBIW]\d(\.\d)?$|.* after its last action$",
            told,
        )
        assert seconds < 5
    assert ranks[rank][0] == cause


def beside(mesh: Mesh) -> tuple[str, float]:
    """A rank fails while its tp neighbour waits for it inside a layer."""

    class Summed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if mesh.rank == 1 and not fine[0]:
                raise ArithmeticError("division of nothing")
            return super().forward(x) + all_reduce(x.detach(), mesh["tp"])

    fine = [True]
    pipeline = Pipeline([Summed(4, 4)], mesh["pp"], pairs=mesh.pairs("pp"), closes=[mesh["tp"]])
    inputs = list(torch.randn(4, 2, 4))
    pipeline.run(inputs, lambda y, m: y.sum())
    fine[0] = False
    start = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        pipeline.run(inputs, lambda y, m: y.sum())
    return str(caught.value), time.monotonic() - start


def test_ranks_of_other_pipelines_are_freed_too() -> None:
    for told, seconds in on_ranks(beside, pp=2, tp=2):
        assert told.startswith("rank 1, stage 0, micro-batch 0, action F0: ArithmeticError: divis")
        assert seconds < 5


def test_one_rank_raises_its_own_exception_with_a_note_and_can_go_on() -> None:
    [(kind, notes, loss)] = on_ranks(alone)
    assert (kind, notes) == ("KeyError", ["in the pipeline, stage 0, micro-batch 2, action F2"])
    assert loss == loss  # a number


def alone(mesh: Mesh) -> tuple[str, list[str], float]:
    pipeline = Pipeline([Fragile(nn.Linear(4, 4), "forward")], mesh["pp"])
    inputs = list(torch.randn(4, 2, 4))
    with pytest.raises(KeyError) as caught:
        pipeline.run(inputs, lambda y, m: y.sum())
    loss = pipeline.run(inputs, lambda y, m: y.sum())
    return type(caught.value).__name__, caught.value.__notes__, loss.item()
