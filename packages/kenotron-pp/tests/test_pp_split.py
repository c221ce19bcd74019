"""Cutting layers: contiguous, complete, non-empty, and as balanced as exhaustive search finds."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from kenotron_pp import Stages, interleaved, split_layers, zero_bubble_v


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

    with pytest.raises(ValueError, match="in 1.5 stages"):
        split_layers([1, 1, 1], 1.5)
    with pytest.raises(ValueError, match="there are no layers to cut: give at least one"):
        split_layers([], 1)


@pytest.mark.parametrize("cost", [-2, float("nan"), float("inf")])
def test_a_cost_that_is_none(cost: float) -> None:
    words = f"is {cost}: give a finite number from 0 up"
    with pytest.raises(ValueError, match=f"cost of layer 1 {words}"):
        split_layers([1, cost, 1], 2)
    with pytest.raises(ValueError, match=f"cost of last {words}"):
        split_layers([1, 1], 2, last=cost)
    with pytest.raises(ValueError, match="costs add up to infinity: give them in a larger unit"):
        split_layers([1e308, 1e308], 2)


def test_stages_know_their_layers_and_parameters() -> None:
    layers = [("embedding", nn.Identity()), ("layers.1", nn.Identity()), ("layers.10", nn.ReLU())]
    stages = Stages.balanced(layers, [1, 1, 2], 2)
    assert [name for name, _ in stages.own(layers, 0)] == ["embedding", "layers.1"]
    assert stages.of_parameter("layers.1.weight") == 0
    assert stages.of_parameter("layers.10.attention.weight") == 1
    with pytest.raises(ValueError, match="'head.weight' belongs to no layer of embedding, layers"):
        stages.of_parameter("head.weight")


def test_what_the_ends_do_beside_their_layers_counts() -> None:
    assert split_layers([1] * 6, 2) == [range(3), range(3, 6)]
    assert split_layers([1] * 6, 2, last=2) == [range(4), range(4, 6)]
    assert split_layers([1] * 6, 2, first=2) == [range(2), range(2, 6)]
    with pytest.raises(ValueError, match="cost of first is -1: give a finite"):
        split_layers([1], 1, first=-1)


NAMES = ["embedding", *(f"layers.{i}" for i in range(6)), "head"]
LAYERS = [(name, nn.Identity()) for name in NAMES]


def test_chunks_of_a_rank() -> None:
    for schedule, second in (
        (interleaved(2), ["layers.3", "layers.4"]),
        (zero_bubble_v, NAMES[6:]),
    ):
        stages = Stages.balanced(LAYERS, [1] * 8, 2, schedule)
        chunks = stages.chunks(LAYERS, 0)
        assert stages.n_ranks == 2 and len(chunks) == 2
        assert [name for name, _ in chunks[0]] == NAMES[:2]
        assert [name for name, _ in chunks[1]] == second
        assert [name for name, _ in stages.own(LAYERS, 0)] == NAMES[:2] + second
    assert stages.of_parameter("head.weight") == 0
    assert stages.of_parameter("layers.2.weight") == 1
    with pytest.raises(ValueError, match="8 layers were given 7 costs"):
        Stages.balanced(LAYERS, [1] * 7, 2)
    with pytest.raises(ValueError, match="Stages.balanced: n_ranks is 0: give a whole number of"):
        Stages.balanced(LAYERS, [1] * 8, 0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"no stages for rank {rank}: 2 ranks share the layer"):
            stages.own(LAYERS, rank)
    with pytest.raises(ValueError, match="7 layers were given to stages of 8: give all layers of"):
        stages.chunks(LAYERS[1:], 0)


def test_explicit_cuts() -> None:
    stages = Stages.at(LAYERS, ["layers.1", 5, "head"], interleaved(2))
    assert [len(indices) for indices in stages.ranges] == [2, 3, 2, 1]
    with pytest.raises(ValueError, match="no layer 'tail' to cut before: there are embedding, "):
        Stages.at(LAYERS, ["tail"])
    for starts in ([0], [5, 3], [8]):
        with pytest.raises(ValueError, match="cannot cut 8 layers before"):
            Stages.at(LAYERS, starts)
    with pytest.raises(ValueError, match="3 stages cannot be dealt to ranks with 2 chunks"):
        Stages.at(LAYERS, [2, 4], zero_bubble_v)
