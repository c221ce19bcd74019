"""Experts: the numbers of one process on every layout, loads and biases included."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from engine_cases import EXPERTS, batches_of, plan, training_of

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    Piece,
    evaluate,
    gradient_deviations,
    gradients_of,
    join_pieces,
    training_step,
    weight_pieces,
)
from kenotron_pp import schedule_named
from kenotron_tp import TPMode

assert EXPERTS.moe_config is not None
MOE = EXPERTS.moe_config
BIAS = "layers.1.experts.router.choice_bias"


def measured(
    mesh: Mesh, options: dict[str, Any], zero: int = 1
) -> tuple[list[float], dict[str, Any], list[Piece], list[Piece]]:
    """Three losses and norms; loads of the last step; first gradient; weights after the last."""
    schedule = schedule_named(options.get("schedule", "1f1b"))
    chosen = plan(**{"spec": EXPERTS.decoder, **options, "schedule": schedule})
    training = training_of(mesh, chosen, zero_stage=zero)
    batches = batches_of(mesh, 3)
    loss, pieces = gradients_of(training, batches[0])
    results = [training_step(training, batch, n) for n, batch in enumerate(batches, 1)]
    assert results[0].loss == loss
    numbers = [x for r in results for x in (r.loss, r.grad_norm)]
    return numbers, results[-1].figures["experts"], pieces, weight_pieces(training)


@cache
def on_one() -> Any:
    return on_ranks(measured, {})[0]


SP = {"mode": TPMode(sequence_parallel=True)}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any], int]] = [
    ({"dp": 2, "ep": 2}, {}, 1),
    ({"dp": 2}, {"recompute": "full"}, 0),
    ({"tp": 2, "ep": 2}, SP | {"recompute": "feed_forward"}, 1),
    ({"cp": 2}, {"recompute": "mixer"}, 0),
    ({"tp": 2, "ep": 2}, {}, 1),
    ({"tp": 2}, SP | {"recompute": "selective"}, 1),
    ({"cp": 2, "ep": 2}, {"recompute": "full"}, 0),
    ({"pp": 2}, {"schedule": "zb-h1"}, 1),
    ({"dp": 2, "tp": 2, "ep": 4}, SP, 1),
    ({"pp": 2, "dp": 2, "ep": 2}, {"recompute": "selective"}, 0),
    ({"dp": 4, "ep": 2}, {}, 1),
    ({"pp": 2, "cp": 2, "tp": 2, "ep": 4}, SP | {"schedule": "zb-h1"}, 1),
]


@pytest.mark.parametrize(("axes", "options", "zero"), LAYOUTS, ids=str)
def test_every_layout_has_the_numbers_of_one_process(
    axes: dict[str, int], options: dict[str, Any], zero: int
) -> None:
    numbers, loads, gradient, weights = on_one()
    ranks = on_ranks(measured, options, zero, **axes)
    for found, spread, _, _ in ranks:
        assert found == pytest.approx(numbers, rel=1e-5)
        assert spread == loads
    deviations = gradient_deviations(join_pieces(r[2] for r in ranks), join_pieces([gradient]))
    assert max(deviations.values()) <= 1
    ours, theirs = join_pieces(r[3] for r in ranks), join_pieces([weights])
    assert ours.keys() == theirs.keys() and BIAS in ours
    assert all(abs(ours[name] - theirs[name]).max() < 1e-4 for name in theirs)


LIMITED = replace(
    EXPERTS,
    moe_config=replace(
        MOE, router_aux_loss_type="micro_batch", router_jitter_noise=0.1, expert_capacity_factor=0.9
    ),
).decoder
FIXED: list[tuple[dict[str, int], dict[str, Any]]] = [  # micro-batches have a size of their own
    ({"tp": 2, "ep": 2}, SP | {"recompute": "selective", "ep_chunks": 2}),
    ({"cp": 2, "ep": 2}, {"recompute": "full"}),
    ({"pp": 2, "tp": 2}, {"schedule": "zb-h1", "ep_chunks": 2}),
]


def test_drops_noise_and_losses_of_micro_batches_are_those_of_one_process() -> None:
    ((numbers, loads, gradient, _),) = on_ranks(measured, {"spec": LIMITED})
    assert loads["layer_1"]["drops"] > 20
    for axes, options in FIXED:
        ranks = on_ranks(measured, {"spec": LIMITED, **options}, **axes)
        for found, spread, _, _ in ranks:
            assert found == pytest.approx(numbers, rel=1e-5)
            assert spread == loads
        deviations = gradient_deviations(join_pieces(r[2] for r in ranks), join_pieces([gradient]))
        assert max(deviations.values()) <= 1


JOINT = replace(EXPERTS, moe_config=replace(MOE, router_aux_loss_type="all_layers")).decoder


def assembled(mesh: Mesh, schedule: str) -> str:
    """The message of the error, if there is one."""
    try:
        training_of(mesh, plan(spec=JOINT, schedule=schedule_named(schedule)))
    except ValueError as error:
        return str(error)
    return ""


def test_a_loss_of_all_layers_is_refused_over_stages() -> None:
    assert on_ranks(assembled, "zb-h1", tp=2) == ["", ""]
    for message in on_ranks(assembled, "1f1b", pp=2):
        assert message.startswith("balance all_layers was given with 2 parts of the model over pp")
        assert message.endswith("choose micro_batch or sample, or pp = 1 with one chunk")


def test_loads_say_how_tokens_are_spread() -> None:
    _, loads, _, weights = on_one()
    load, bias = loads["layer_1"], join_pieces([weights])[BIAS]
    assert len(loads) == 1 and load["max_over_mean"] >= 1 and 0 < load["entropy"] <= 1
    assert (load["bias_min"], load["bias_max"]) == pytest.approx((bias.min(), bias.max()))
    assert abs(bias.mean()) < 1e-8 and 0 < abs(bias).max() <= 3 * 2 * 0.01


def evaluated(mesh: Mesh) -> tuple[float, float]:
    training = training_of(mesh, plan(spec=EXPERTS.decoder))
    (batch,) = batches_of(mesh, 1)
    return evaluate(training, [batch], ("all",)).loss, training_step(training, batch, 1).loss


def test_the_reported_loss_is_the_cross_entropy_alone() -> None:
    for found, wanted in on_ranks(evaluated, dp=2, ep=2):
        assert found == pytest.approx(wanted, rel=1e-6)
