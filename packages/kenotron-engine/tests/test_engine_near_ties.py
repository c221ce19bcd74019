"""Near ties: a layout may choose another expert only where scores differ by rounding.

The weights of one process are computed with on every layout. A score is at most 1: rounding moves
it by less than ``eps`` of the model's dtype, the distance of 1 from the next number.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine_cases import ADAMW, EXPERTS, batches_of, plan
from expert_choices import Chosen, Token, choices_of, flips, routers_of, set_weights

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    Training,
    Whole,
    build_training,
    join_pieces,
    training_step,
    weight_pieces,
)
from kenotron_optim import LRSchedulerConfig

Routed = list[tuple[Token, Chosen]]
STEPS, BATCHES = 100, 8
MOST = 0.02
"""Share of tokens that rounding may send elsewhere."""
assert EXPERTS.moe_config is not None
SPARSE = replace(EXPERTS.moe_config, layers=(-1,), router_aux_loss_coef=0.001)
FAST = LRSchedulerConfig(learning_rate=2e-2, min_decay_lr=1e-3)
TOKENS = 2 * 8 * 12 * BATCHES
"""Layers x samples of a batch x tokens of a sample x batches."""


def training_of(mesh: Mesh, dtype: str) -> Training:
    chosen = plan(spec=replace(EXPERTS, moe_config=SPARSE).decoder, dtype=getattr(torch, dtype))
    return build_training(chosen, replace(ADAMW, learning_rate_scheduler=FAST), mesh, STEPS)


def trained(mesh: Mesh, dtype: str) -> tuple[Whole, Routed]:
    """Weights after some steps, and what they choose for further batches."""
    training, batches = training_of(mesh, dtype), batches_of(mesh, STEPS + BATCHES)
    for number, batch in enumerate(batches[:STEPS], 1):
        training_step(training, batch, number)
    return join_pieces([weight_pieces(training)]), choices_of(training, batches[STEPS:])


@cache
def on_one(dtype: str) -> Any:
    return on_ranks(trained, dtype)[0]


def routed(mesh: Mesh, dtype: str, whole: Whole, faulty: bool) -> Routed:
    """What these weights choose for the same batches; a fault forgets the bias of one rank."""
    training = training_of(mesh, dtype)
    set_weights(training, whole)
    if faulty and mesh.rank == 1:
        for router in routers_of(training):
            assert router.choice_bias is not None
            router.choice_bias.data.zero_()
    return choices_of(training, batches_of(mesh, STEPS + BATCHES)[STEPS:])


def found_flips(dtype: str, axes: dict[str, int], *, faulty: bool = False) -> list[float]:
    """Margins of the tokens that a layout sends to other experts than one process."""
    whole, one = on_one(dtype)
    assert len(one) == TOKENS
    return sorted(flips(on_ranks(routed, dtype, whole, faulty, **axes), one).values())


LAYOUTS = [{"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "tp": 2}]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choices_differ_only_at_near_ties(dtype: str, axes: dict[str, int]) -> None:
    margins, bound = found_flips(dtype, axes), torch.finfo(getattr(torch, dtype)).eps
    said = f"{len(margins)} of {TOKENS} tokens, margins {margins[-5:]}, rounding {bound:.1e}"
    assert max(margins, default=0.0) <= bound and len(margins) <= MOST * TOKENS, said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_that_one_rank_forgot_is_no_near_tie(dtype: str) -> None:
    margins = found_flips(dtype, {"tp": 2, "ep": 2}, faulty=True)
    assert margins[-1] > 2 * torch.finfo(getattr(torch, dtype)).eps
    assert len(margins) > MOST * TOKENS


def test_scores_are_not_all_alike() -> None:
    """Else every choice would be a near tie."""
    margins = sorted(chosen.margin for _, chosen in on_one("bfloat16")[1])
    assert margins[TOKENS // 2] > torch.finfo(torch.bfloat16).eps


def test_what_a_flip_changes_later_is_not_counted() -> None:
    one = [((layer, 7, place), Chosen((0, 1), 0.1 + place)) for layer in (0, 1) for place in (0, 1)]
    ours = dict(one) | {token: Chosen((0, 2), 0.1) for token in [(0, 7, 1), (1, 7, 0), (1, 7, 1)]}
    split = list(ours.items())
    assert flips([split[:2], split[2:]], one) == {(0, 7, 1): 1.1, (1, 7, 0): 0.1}
    for wrong in (split[:3], [*split, split[0]]):
        with pytest.raises(ValueError, match=r"tokens were routed, and 4 by one process"):
            flips([wrong], one)
