"""An exponential moving average of the weights: that of one process, on every layout and stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine_cases import batches_of, training_of
from torch import Tensor

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import evaluate, training_step
from kenotron_optim import MuonConfig, WeightAverageConfig

EMA = WeightAverageConfig(decay=0.75)
STEPS = 4


def masters_of(training: Any) -> dict[str, Tensor]:
    found = training.optimizer.state().items()
    return {n.split(".", 2)[2]: x.clone() for n, (x, _) in found if ".master." in n}


def averaged(
    mesh: Mesh, optim: dict[str, Any], every: int = 1
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Masters after each update, averages after the last, and slices of both by name."""
    config = replace(EMA, every=every)
    training = training_of(mesh, weight_average=config, **optim)
    seen = []
    for step, batch in enumerate(batches_of(mesh, STEPS), 1):
        training_step(training, batch, step)
        seen.append(masters_of(training))
    state = {n.split(".", 2)[2]: x.clone() for n, (x, _) in training.averages.state().items()}
    whole = {}
    with training.averages.in_place():
        whole = {n: p.detach().clone() for n, p in training.parameters().items()}
    after = masters_of(training)
    assert all(torch.equal(after[name], x) for name, x in seen[-1].items())
    return seen, state, whole


def by_hand(seen: list[dict[str, Tensor]], every: int) -> dict[str, Tensor]:
    taken = seen[every - 1 :: every]
    found = {name: x.clone() for name, x in taken[0].items()}
    for weights in taken[1:]:
        for name, x in weights.items():
            found[name].lerp_(x, 1 - EMA.decay)
    return found


OPTIM: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 1": {},
    "stage 2": {"zero_stage": 2, "reduce": "step"},
    "stage 3": {"zero_stage": 3, "reduce": "step"},
    "offload": {"offload": True},
    "muon": {"optimizer_factory": MuonConfig()},
    "state in bf16": {"state_dtype": "bfloat16"},
}


@cache
def on_one() -> Any:
    return on_ranks(averaged, {})[0]


@pytest.mark.parametrize("optim", OPTIM)
def test_the_average_is_that_by_hand(optim: str) -> None:
    for seen, state, _ in on_ranks(averaged, OPTIM[optim], dp=2):
        want = by_hand(seen, 1)
        assert state.keys() == want.keys() and state
        assert all(torch.equal(state[name], x) for name, x in want.items())


def test_every_second_update_may_be_taken_in() -> None:
    ((seen, state, _),) = on_ranks(averaged, {}, 2)
    assert all(torch.equal(state[name], x) for name, x in by_hand(seen, 2).items())


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_model_computes_with_the_averages(axes: dict[str, int], stage: int) -> None:
    """Parameters in place are one process's averages, cut as the layout cuts them."""
    _, _, one = on_one()
    for _, _, own in on_ranks(averaged, {"zero_stage": stage, "reduce": "step"}, **axes):
        for name, x in own.items():
            if x.shape == one[name].shape:
                assert torch.allclose(x, one[name], rtol=0, atol=1e-4)
        assert own


def left_out(mesh: Mesh) -> list[bool]:
    """A step that is not finite changes no average."""
    training = training_of(mesh, weight_average=EMA, nonfinite="skip")
    *good, last = batches_of(mesh, 3)
    for step, batch in enumerate(good, 1):
        training_step(training, batch, step)
    before = {n: x.clone() for n, (x, _) in training.averages.state().items()}

    def spoil(slices: dict[str, Tensor]) -> None:
        next(iter(slices.values())).fill_(torch.nan)

    training_step(training, last, 3, look=spoil)
    return [torch.equal(before[n], x) for n, (x, _) in training.averages.state().items()]


def test_a_step_that_is_left_out_changes_no_average() -> None:
    assert all(all(rank) for rank in on_ranks(left_out, dp=2))


def losses(mesh: Mesh) -> tuple[float, float, float]:
    """Loss of the weights, of the averages, and of the weights again."""
    training = training_of(mesh, weight_average=EMA, zero_stage=3)
    batches = batches_of(mesh, STEPS)
    for step, batch in enumerate(batches, 1):
        training_step(training, batch, step)
    held = type(batches[0])(
        batches[0].tokens_MBS, batches[0].labels_MBS, batches[0].positions_MBS,
        batches[0].samples_MB, sources_MB=torch.zeros_like(batches[0].samples_MB),
    )  # fmt: skip
    first = evaluate(training, [held], ("all",)).loss
    with training.averages.in_place():
        middle = evaluate(training, [held], ("all",)).loss
    return first, middle, evaluate(training, [held], ("all",)).loss


def test_an_evaluation_of_the_averages_leaves_the_weights() -> None:
    ((one, average, again),) = on_ranks(losses)
    assert one == again and one < average  # the average lags behind, and losses fall
    for axes in ({"dp": 2}, {"pp": 2}):
        for rank in on_ranks(losses, **axes):
            assert rank == pytest.approx((one, average, again), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decay": 1.0}, "decay: 1.0 was given; it must be above 0 and below 1, as 0.999"),
        ({"every": 0}, "every: 0 was given; it must be at least 1"),
    ],
)
def test_bad_arguments_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightAverageConfig(**values)
