"""Every schedule against a plain loop over micro-batches in one process: bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pp_models import (
    WIDTH,
    Named,
    Pair,
    copied,
    decoder,
    differences,
    pipeline_of,
    plain,
    tie,
    token_loss,
    tokens,
)
from torch import Tensor

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_pp import (
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)

ALL = [gpipe, one_f_one_b, interleaved(2), interleaved(3), zero_bubble_h1, zero_bubble_v]
MODELS = {
    "plain": {},
    "tied": {"tied": True},
    "recompute": {"recompute": True, "tied": True},
    "bf16": {"dtype": torch.bfloat16, "aux": True},
    "added losses, recompute": {"aux": True, "recompute": True},
}


def compare(mesh: Mesh, schedules: list[Schedule], counts: list[int]) -> list[str]:
    """Names of everything that is not equal, over all models, schedules and counts."""
    found = []
    for title, options in MODELS.items():
        options = dict(options)
        tied, dtype = options.pop("tied", False), options.pop("dtype", torch.float32)
        layers = [layer.to(dtype) for layer in decoder(3 * mesh["pp"].size + 1, **options)]
        if tied:
            tie(layers)
        for microbatches in counts:
            inputs = tokens(microbatches)
            reference = copied(layers)
            main, added = plain(reference, inputs, token_loss(inputs))
            for schedule in schedules:
                pipeline, own = pipeline_of(layers, mesh["pp"], schedule, mesh.pairs("pp"))
                loss = pipeline.run(inputs, token_loss(inputs))
                wrong = differences(own, reference)
                if pipeline.losses.main != main or loss != main + pipeline.losses.auxiliary:
                    wrong.append("loss")
                if not torch.allclose(pipeline.losses.auxiliary, added):
                    wrong.append("added loss")
                if pipeline.evaluate(inputs, token_loss(inputs)).isnan():
                    wrong.append("evaluation")
                found += [f"{title}, {schedule.name}, {microbatches}: {name}" for name in wrong]
    return found


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.by_turns(2)
def test_every_schedule_equals_one_process(pp: int) -> None:
    counts = sorted({1 if pp < 3 else pp - 1, pp + 5})
    for found in on_ranks(compare, ALL, counts, pp=pp):
        assert not found


def structures(mesh: Mesh) -> list[str]:
    """Tuples with whole numbers and a skip over all stages, and dicts with an unused tensor."""
    found = []
    for kind in (Pair, Named):
        torch.manual_seed(0)
        count = 3 * mesh["pp"].size
        layers = [kind(i == 0, i == count - 1) for i in range(count)]
        inputs = list(torch.randn(6, 4, WIDTH))

        def loss_fn(y: Tensor, m: int, inputs: list[Tensor] = inputs) -> Tensor:
            return (y - inputs[m]).square().sum()

        reference = copied(layers)
        main, _ = plain(reference, inputs, loss_fn)
        for schedule in ALL:
            pipeline, own = pipeline_of(layers, mesh["pp"], schedule, mesh.pairs("pp"))
            loss = pipeline.run(inputs, loss_fn)
            wrong = differences(own, reference) + ([] if loss == main else ["loss"])
            outputs = pipeline.forward(inputs)
            if outputs and not all(map(torch.equal, outputs, map(through(reference), inputs))):
                wrong.append("outputs")
            assert bool(outputs) == pipeline.is_last
            found += [f"{kind.__name__}, {schedule.name}: {name}" for name in wrong]
    return found


def through(layers: list[Any]) -> Any:
    def apply(x: Any) -> Any:
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        return x

    return apply


@pytest.mark.parametrize("pp", [2, 4])
def test_tuples_and_dicts_with_tensors_that_skip_stages(pp: int) -> None:
    for found in on_ranks(structures, pp=pp):
        assert not found


def fired(mesh: Mesh) -> list[str]:
    """Parameters whose hook did not fire once for each micro-batch, in ascending order."""
    found = []
    for schedule in ALL:
        layers = decoder(3 * mesh["pp"].size + 1)
        tie(layers)
        pipeline, own = pipeline_of(layers, mesh["pp"], schedule, mesh.pairs("pp"))
        calls: dict[int, int] = {}

        def note(parameter: Tensor, calls: dict[int, int] = calls) -> None:
            calls[id(parameter)] = calls.get(id(parameter), 0) + 1

        parameters = [p for layer in own.values() for p in layer.parameters()]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(note)
        inputs = tokens(5)
        pipeline.run(inputs, token_loss(inputs))
        if {calls.get(id(parameter)) for parameter in parameters} != {5}:
            found.append(schedule.name)
    return found


def test_each_parameter_is_told_once_for_each_micro_batch() -> None:
    assert on_ranks(fired, pp=2) == [[], []]
