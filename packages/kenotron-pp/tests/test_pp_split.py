"""Cutting layers: contiguous, complete, non-empty, and as balanced as exhaustive search finds."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from kenotron_pp import Stages, split_layers


def best_by_trying_all(costs: list[float], n_stages: int) -> float:
    inner = itertools.combinations(range(1, len(costs)), n_stages - 1)
    cuts = ([0, *ends, len(costs)] for ends in inner)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)


COSTS = [
    [1.0] * 8,
    [0.0, 5, 5, 5, 5, 5, 0, 3],
    [9, 1, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 1, 1, 9],
    [0.0] * 7,
    [3, 1, 4, 1, 5, 9, 2, 6],
]


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("n_stages", range(1, 8))
def test_the_costliest_stage_is_as_cheap_as_can_be(costs: list[float], n_stages: int) -> None:
    found = split_layers(costs, n_stages)
    assert [i for stage in found for i in stage] == list(range(len(costs)))
    assert len(found) == n_stages and all(found)
    worst = max(sum(costs[i] for i in stage) for stage in found)
    assert worst == best_by_trying_all(costs, n_stages)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="cannot cut 3 layers in 4 stages.*choose 1 to 3"):
        split_layers([1, 1, 1], 4)
    with pytest.raises(ValueError, match="in 0 stages"):
        split_layers([1, 1, 1], 0)


def test_a_negative_cost() -> None:
    with pytest.raises(ValueError, match="cost of layer 1 is -2"):
        split_layers([1, -2], 2)


def test_stages_know_their_layers_and_parameters() -> None:
    layers = [("embedding", nn.Identity()), ("layers.1", nn.Identity()), ("layers.10", nn.ReLU())]
    stages = Stages.balanced(layers, [1, 1, 2], 2)
    assert [name for name, _ in stages.own(layers, 0)] == ["embedding", "layers.1"]
    assert stages.of_parameter("layers.1.weight") == 0
    assert stages.of_parameter("layers.10.attention.weight") == 1
    with pytest.raises(ValueError, match="'head.weight' belongs to no layer of embedding, layers"):
        stages.of_parameter("head.weight")
