"""One binary tree over samples: the same bits for any order of arrival and any ranks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kenotron_dist import tree_sum
from kenotron_optim.sample_tree import Node, SampleTree, nodes_of


def leaves(samples: int) -> list[Tensor]:
    """Numbers whose sum depends on the order of its additions."""
    draw = torch.Generator().manual_seed(samples)
    return list(torch.randn(samples, 7, generator=draw) * 10 ** torch.randn(samples, 1))


def added(samples: int, nodes: list[tuple[Node, Tensor]]) -> dict[Node, Tensor]:
    tree = SampleTree(samples)
    for node, value in nodes:
        tree.add(node, value.clone())
    return tree.nodes


@settings(deadline=None, max_examples=200)
@given(ranks=st.integers(1, 9), each=st.integers(1, 24), draw=st.randoms(use_true_random=False))
def test_any_order_on_any_ranks_is_one_tree(ranks: int, each: int, draw: random.Random) -> None:
    samples = ranks * each
    values, sent = leaves(samples), []
    for rank in range(ranks):
        own = [((0, i), values[i]) for i in range(rank * each, (rank + 1) * each)]
        draw.shuffle(own)
        nodes = added(samples, own)
        assert sorted(nodes) == sorted(nodes_of(rank * each, (rank + 1) * each, samples))
        sent += nodes.items()
    draw.shuffle(sent)
    [total] = added(samples, sent).values()
    assert torch.equal(total, tree_sum([value.clone() for value in values]))


@given(samples=st.integers(1, 300))
def test_few_nodes_are_kept_of_samples_in_order(samples: int) -> None:
    tree = SampleTree(samples)
    for i, value in enumerate(leaves(samples)):
        tree.add((0, i), value)
        assert len(tree.nodes) <= samples.bit_length()


def test_an_order_of_arrival_would_have_other_bits() -> None:
    values = leaves(12)
    chain = values[0].clone()
    for value in values[1:]:
        chain += value
    assert not torch.equal(chain, tree_sum([value.clone() for value in values]))


@pytest.mark.parametrize(
    ("start", "stop", "samples", "expected"),
    [
        (0, 12, 12, [(4, 0)]),
        (0, 4, 12, [(2, 0)]),
        (8, 12, 12, [(3, 1)]),  # the last four have no siblings up to there
        (9, 12, 12, [(0, 9), (1, 5)]),
        (4, 5, 5, [(2, 1)]),
        (3, 6, 12, [(0, 3), (1, 2)]),
        (0, 1, 1, [(0, 0)]),
        (0, 0, 0, []),
    ],
)
def test_largest_nodes(start: int, stop: int, samples: int, expected: list[Node]) -> None:
    assert nodes_of(start, stop, samples) == expected
