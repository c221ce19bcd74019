"""Weights of domains: the paper's update, and losses by domain that no layout changes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from engine_cases import ADAMW, LLAMA, SEQUENCE, batches_of, plan, training_of

from kenotron_data import Batch
from kenotron_dist import Mesh, all_gather
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    DomainObjective,
    DomainWeights,
    Piece,
    StepResult,
    batch_losses,
    domain_weights_update,
    gradient,
    gradient_deviations,
    gradients_of,
    join_pieces,
    slice_pieces,
    training_step,
    weight_pieces,
)

NAMES = ("prose", "code", "names", "sums")
SHARES = (0.4, 0.3, 0.2, 0.1)
AXES = ("dp", "tp", "pp", "cp")
START = DomainWeights.start(("a", "b"), 1.0, 1e-3)


def test_two_domains_have_the_weights_of_the_paper() -> None:
    state, found = START, []
    for _ in range(3):
        state = state.moved((1.0, 0.0))
        found.append(state.weights)
    oracle = [(0.730828, 0.269172), (0.880293, 0.119707), (0.951905, 0.048095)]
    assert found == [pytest.approx(each, abs=5e-7) for each in oracle]
    assert state.average == pytest.approx([sum(each) / 3 for each in zip(*found, strict=True)])


def test_three_domains_have_the_weights_of_the_paper() -> None:
    even = (1 / 3,) * 3
    found = domain_weights_update(even, (0.3, 0.1, 0.0), step_size=1.0, smoothing=1e-3)
    assert found == pytest.approx((0.390636, 0.319887, 0.289477), abs=5e-7)
    assert math.fsum(found) == pytest.approx(1, abs=1e-15)


def test_no_excess_overflows_and_a_weight_of_0_stays_without_smoothing() -> None:
    found = domain_weights_update((0.5, 0.5, 0.0), (5e4, 0, 9e4), step_size=1, smoothing=0)
    assert found == (1.0, 0.0, 0.0)


def test_an_absent_domain_keeps_its_last_excess() -> None:
    state = START.moved((0.2, 0.5)).moved((0.1, None))
    assert state.excess == (0.1, 0.5)
    assert state.weights == START.moved((0.2, 0.5)).moved((0.1, 0.5)).weights


def test_a_saved_state_comes_back_bit_for_bit_and_is_of_its_domains_alone() -> None:
    state = START.moved((0.1, 1 / 3))
    assert START.restored(state.to_dict()) == state
    other = DomainWeights.start(("b", "a"), 1.0, 1e-3)
    with pytest.raises(ValueError, match="are of a, b, but the domains are b, a: give the former"):
        other.restored(state.to_dict())


def tagged(batch: Batch) -> Batch:
    """Rows by domain; the last domain is not in the first global batch."""
    assert batch.sources_MB is not None
    last = (batch.samples_MB >= 8) & (batch.samples_MB % 5 == 0)
    batch.sources_MB.copy_(torch.where(last, 3, batch.samples_MB % 3))
    return batch


def weighed(batch: Batch, factors: tuple[float, ...], z_loss: float = 0.0) -> DomainObjective:
    """Losses of a reference that is better on some tokens and worse on others."""
    places = batch.samples_MB[..., None] * SEQUENCE + torch.arange(SEQUENCE)
    reference = (4.1 + 0.5 * torch.sin(places.double())).float()
    return DomainObjective(names=NAMES, factors=factors, reference_MBS=reference, z_loss=z_loss)


class Trained(NamedTuple):
    """What a rank found."""

    results: list[StepResult]
    state: DomainWeights
    weights: list[Piece]
    before: torch.Tensor
    """Losses of the tokens of the first global batch, before the first step."""


def trained(
    mesh: Mesh, z_loss: float = 0.0, reproducible: bool = False, chunks: int = 1
) -> Trained:
    """Three steps of a proxy."""
    of = plan(spec=replace(LLAMA.decoder, z_loss=z_loss))
    optim = {}
    if reproducible:
        of = replace(of, reproducible=True, virtual_shards=2, virtual_chunks=chunks)
        optim = {"optimizer_factory": replace(ADAMW.optimizer_factory, torch_adam_is_fused=False)}
    training = training_of(mesh, of, **optim)
    state, results = DomainWeights.start(NAMES, 1.0, 1e-3), []
    batches = list(map(tagged, batches_of(mesh, 3)))
    before = all_gather(batch_losses(training, batches[0]), mesh["dp"])
    for step, batch in enumerate(batches, 1):
        factors = tuple(a / p for a, p in zip(state.weights, SHARES, strict=True))
        objective = weighed(batch, factors, z_loss)
        results.append(training_step(training, batch, step, objective=objective))
        state = state.after(results[-1])
    return Trained(results, state, weight_pieces(training), before)


@cache
def on_layout(axis: str | None) -> list[Trained]:
    return on_ranks(trained, **({} if axis is None else {axis: 2}))


def on_one() -> Trained:
    return on_layout(None)[0]


def figures(of: StepResult) -> list[float]:
    """All numbers, those of absent domains as -1."""
    losses, excess = (of.figures[f"domain_{name}"].values() for name in ("losses", "excess"))
    numbers = (of.loss, of.figures["dro_loss"], *losses, *excess)
    return [-1.0 if each is None else each for each in numbers]


@pytest.mark.parametrize("axis", AXES)
def test_every_layout_has_the_losses_and_weights_of_one_process(axis: str) -> None:
    one, ranks = on_one(), on_layout(axis)
    for found in ranks:
        assert [r.figures for r in found.results] == [r.figures for r in ranks[0].results]
        assert found.state == ranks[0].state  # bit for bit
        for expected, result in zip(one.results, found.results, strict=True):
            assert figures(result) == pytest.approx(figures(expected), rel=1e-5)
            assert result.figures["domain_samples"] == expected.figures["domain_samples"]
        assert found.state.weights == pytest.approx(one.state.weights, rel=1e-6)
        assert found.state.excess == pytest.approx(one.state.excess, rel=1e-5)
        assert found.before.shape == (8, SEQUENCE)
        assert torch.allclose(found.before, one.before, rtol=1e-5, atol=1e-6)
    if axis == "pp":
        assert ranks[0].state == one.state and (ranks[0].before == one.before).all()
    ours, theirs = join_pieces(r.weights for r in ranks), join_pieces([one.weights])
    assert all(abs(ours[name] - theirs[name]).max() < 1e-4 for name in theirs)


@pytest.mark.parametrize(
    ("chunks", "layouts"),
    [
        (1, ({"dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2})),
        (4, ({"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp": 2})),
    ],
)
def test_a_reproducible_proxy_has_the_bits_of_one_process(
    chunks: int, layouts: tuple[dict[str, int], ...]
) -> None:
    [one] = on_ranks(trained, 1e-3, True, chunks)
    assert figures(one.results[0]) == pytest.approx(figures(on_one().results[0]), rel=1e-5)
    torch.testing.assert_close(one.before, on_one().before, rtol=1e-5, atol=1e-5)
    for sizes in layouts:
        ranks = on_ranks(trained, 1e-3, True, chunks, **sizes)
        assert all(found.results == one.results for found in ranks)
        assert all(found.state == one.state for found in ranks)
        assert all(torch.equal(found.before, one.before) for found in ranks)
        ours, theirs = join_pieces(r.weights for r in ranks), join_pieces([one.weights])
        assert not [name for name in theirs if (ours[name] != theirs[name]).any()]


def test_a_domain_that_a_batch_lacks_has_no_loss_and_keeps_its_weight_moving() -> None:
    results, state = on_one().results, on_one().state
    first, last = results[0].figures, NAMES[3]
    assert first["domain_losses"][last] is None and first["domain_excess"][last] is None
    assert first["domain_samples"][last] == 0 and sum(first["domain_samples"].values()) == 8
    assert state.steps == 3 and first["dro_loss"] != results[0].loss


def sums_by_hand(mesh: Mesh) -> tuple[list[float], list[float]]:
    """Losses of the first batch, and their sums over tokens as the paper has them."""
    training, batch = training_of(mesh), tagged(batches_of(mesh, 1)[0])
    domains, factors = weighed(batch, (1.0, 2.0, 0.5, 1.0)), torch.tensor([1.0, 2.0, 0.5, 1.0])
    result = training_step(training, batch, 1, objective=domains)
    losses = batch_losses(training_of(mesh), batch).view_as(batch.labels_MBS).double()
    targets = batch.labels_MBS != -100
    excess = (losses - domains.reference_MBS).clamp_min(0)
    assert batch.sources_MB is not None
    rows = [targets & (batch.sources_MB == d)[..., None] for d in range(3)]
    weighted = (losses * targets * factors[batch.sources_MB][..., None]).sum() / targets.sum()
    by_hand = [losses[targets].mean(), weighted, *(losses[r].mean() for r in rows)]
    found = figures(result)
    found = [*found[:5], *found[6:9]]  # the last domain is not in this batch
    return found, [float(each) for each in [*by_hand, *(excess[r].mean() for r in rows)]]


def test_losses_are_means_over_tokens_and_excess_is_cut_at_0_token_by_token() -> None:
    ((found, by_hand),) = on_ranks(sums_by_hand)
    assert found == pytest.approx(by_hand, rel=1e-6)


def gradients(mesh: Mesh) -> list[list[Piece]]:
    """Gradients of the plain loss, with factors of 1, and of each of two sets of domains."""
    batch = tagged(batches_of(mesh, 1)[0])
    found = [gradients_of(training_of(mesh), batch)[1]]
    for factors in ((1.0,) * 4, (1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0), (3.0, 0.5, 3.0, 0.5)):
        training = training_of(mesh)
        slices = gradient(training, batch, 1, objective=weighed(batch, factors)).slices
        found.append(slice_pieces(training, slices))
    return found


def test_factors_are_constants_and_nothing_is_clamped_in_the_gradient() -> None:
    (found,) = on_ranks(gradients)
    plain, ones, some, others, both = (join_pieces([pieces]) for pieces in found)
    assert max(gradient_deviations(ones, plain).values()) <= 1
    for name, whole in both.items():
        assert whole == pytest.approx(3 * some[name] + 0.5 * others[name], abs=1e-6)


def test_a_z_loss_is_weighed_and_is_no_part_of_what_is_reported() -> None:
    plain, with_z = on_one().results[0], on_ranks(trained, 1e-3)[0].results[0]
    assert figures(with_z) == pytest.approx(figures(plain), rel=1e-6)
    assert with_z.grad_norm != plain.grad_norm
