"""The fixed tree: one result, whatever the order of arrival."""

import random

import pytest
import torch

from kenotron_cp.fixed_tree import FixedTree, level_of


def in_tree(values, order, top):
    tree = FixedTree(values, top, lambda a, b: a + b)
    for strip in order:
        tree.add(0, strip, values[strip])
    return tree.take()


@pytest.mark.parametrize("strips", [range(16), range(3, 11), [0, 5, 6, 13], [7]])
def test_the_order_of_arrival_does_not_matter(strips):
    values = {s: torch.randn(50, generator=torch.Generator().manual_seed(s)) for s in strips}
    found = []
    for seed in range(20):
        order = random.Random(seed).sample(list(strips), len(strips))
        found.append(in_tree(values, order, (4, 0)))
        assert torch.equal(found[0], found[-1])
    torch.testing.assert_close(found[0], sum(values.values()))


def test_a_node_in_one_piece_is_the_sum_of_its_strips():
    values = {s: torch.randn(50, generator=torch.Generator().manual_seed(s)) for s in range(16)}
    tree = FixedTree(values, (4, 0), lambda a, b: a + b)
    for index in (2, 0, 3, 1):
        part = {s: values[s] for s in range(4 * index, 4 * index + 4)}
        tree.add(2, index, in_tree(part, part, (2, index)))
    assert torch.equal(tree.take(), in_tree(values, range(16), (4, 0)))


def test_left_and_right_keep_their_sides():
    tree = FixedTree(range(4), (2, 0), lambda a, b: f"({a}{b})")
    for strip in (3, 1, 0, 2):
        tree.add(0, strip, str(strip))
    assert tree.take() == "((01)(23))"


def test_a_missing_value_is_an_error_and_no_strips_are_none():
    tree = FixedTree([0, 1], (1, 0), lambda a, b: a + b)
    tree.add(0, 1, 1.0)
    with pytest.raises(RuntimeError, match=r"strips \[0, 1\] have not all arrived"):
        tree.take()
    assert FixedTree([], (1, 0), lambda a, b: a + b).take() is None
    assert [level_of(n) for n in (1, 2, 3, 4, 6, 16)] == [0, 1, 2, 2, 3, 4]
