"""A step: the numbers of one process on every layout, and what it refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from engine_cases import LLAMA, batches_of, training_of, with_targets

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    Piece,
    evaluate,
    global_counts,
    gradient_deviations,
    gradients_of,
    join_pieces,
    training_step,
    weight_pieces,
)

LAYOUTS: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"cp": 3}]


def measured(mesh: Mesh) -> tuple[list[float], list[Piece], list[Piece]]:
    """Three losses and norms; the gradient of the first step; weights after the last."""
    training, batches = training_of(mesh), batches_of(mesh, 3)
    loss, pieces = gradients_of(training, batches[0])
    results = [training_step(training, batch, n) for n, batch in enumerate(batches, 1)]
    assert results[0].loss == loss
    return [x for r in results for x in (r.loss, r.grad_norm)], pieces, weight_pieces(training)


@cache
def on_one() -> Any:
    return on_ranks(measured)[0]


@pytest.mark.smoke
def test_losses_fall_and_begin_at_that_of_chance() -> None:
    numbers, _, _ = on_one()
    assert numbers[0] == pytest.approx(torch.tensor(float(LLAMA.vocab_size)).log().item(), abs=0.1)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_every_layout_has_the_numbers_of_one_process(axes: dict[str, int]) -> None:
    numbers, gradient, weights = on_one()
    ranks = on_ranks(measured, **axes)
    for found, _, _ in ranks:
        assert found == pytest.approx(numbers, rel=1e-5)
    deviations = gradient_deviations(join_pieces(r[1] for r in ranks), join_pieces([gradient]))
    assert max(deviations.values()) <= 1
    ours, theirs = join_pieces(r[2] for r in ranks), join_pieces([weights])
    assert all(abs(ours[name] - theirs[name]).max() < 1e-4 for name in theirs)


def count(mesh: Mesh, targets: list[int]) -> list[int]:
    return global_counts(with_targets(mesh, targets), mesh).tolist()


def test_targets_and_tokens_of_all_data_ranks_are_counted() -> None:
    assert on_ranks(count, [3, 5], dp=2) == [[8, 16], [8, 16]]


def without_targets(mesh: Mesh, policy: str) -> None:
    """The step is an error and leaves parameters and counts alone; the next one is fine."""
    training = training_of(mesh, nonfinite=policy)
    before = [p.detach().clone() for p in training.parameters().values()]
    with pytest.raises(ValueError, match="step 7: no position of the global batch has a target"):
        training_step(training, with_targets(mesh, [0, 0]), 7)
    after = list(training.parameters().values())
    assert all(map(torch.equal, after, before)) and training.optimizer.steps == 0
    result = training_step(training, with_targets(mesh, [3, 0]), 7)
    assert not result.skipped and result.tokens == 16 and training.optimizer.steps == 1
    training.optimizer.wait_for_parameters()
    assert not all(map(torch.equal, after, before))


@pytest.mark.parametrize("policy", ["error", "continue"])
def test_a_global_batch_without_targets_is_an_error_naming_the_step(policy: str) -> None:
    on_ranks(without_targets, policy, dp=2)


def evaluated(mesh: Mesh) -> tuple[float, float]:
    """The loss of an evaluation, and that of the step that reads the same batch."""
    training, (batch,) = training_of(mesh), batches_of(mesh, 1)
    batch = type(batch)(
        batch.tokens_MBS, batch.labels_MBS, batch.positions_MBS, batch.samples_MB,
        sources_MB=torch.zeros_like(batch.samples_MB),
    )  # fmt: skip
    found = evaluate(training, [batch], ("all",))
    assert found.sources == {"all": found.loss}
    return found.loss, training_step(training, batch, 1).loss


@pytest.mark.parametrize("axes", [{}, {"pp": 2}, {"cp": 2}], ids=str)
def test_an_evaluation_has_the_loss_of_a_step(axes: dict[str, int]) -> None:
    for found, wanted in on_ranks(evaluated, **axes):
        assert found == pytest.approx(wanted, rel=1e-6)
