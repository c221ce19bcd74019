"""Which choices a capacity keeps."""

import pytest
import torch

from kenotron_dist import Axis
from kenotron_ep import mix_experts, plan_exchange, within_capacity


def kept(chosen, capacity, weights=None):
    """The rule, choice by choice."""
    flat = chosen.reshape(-1).tolist()
    order = list(range(len(flat)))
    if weights is not None:
        order.sort(key=lambda i: -weights.reshape(-1)[i].item())  # stable
    count, found = {}, [-1] * len(flat)
    for i in order:
        count[flat[i]] = count.get(flat[i], 0) + 1
        if count[flat[i]] <= capacity:
            found[i] = flat[i]
    return torch.tensor(found, dtype=torch.int64).view_as(chosen)


@pytest.mark.parametrize("seed", range(30))
def test_the_first_or_the_heaviest_choices_stay(seed):
    draw = torch.Generator().manual_seed(seed)
    tokens, top_k, experts = (int(torch.randint(1, 9, (), generator=draw)) for _ in range(3))
    tokens = 0 if seed == 0 else tokens
    chosen = torch.randint(-1, experts, (tokens, top_k), generator=draw)
    weights = torch.randint(0, 4, (tokens, top_k), generator=draw) / 4  # with ties
    for capacity in range(5):
        assert torch.equal(within_capacity(chosen, capacity), kept(chosen, capacity))
        heaviest = within_capacity(chosen, capacity, weights)
        assert torch.equal(heaviest, kept(chosen, capacity, weights))
        found = heaviest[heaviest >= 0]
        assert not found.numel() or found.bincount().max() <= capacity


def test_capacity_and_padding_together_fix_the_shapes():
    x, chosen = torch.ones(5, 2), torch.tensor([[0], [0], [0], [1], [0]])
    shapes = []

    def compute(rows, counts):
        shapes.append((tuple(rows.shape), counts.tolist()))
        return rows

    out = mix_experts(
        x, within_capacity(chosen, 3), torch.ones(5, 1), 3, Axis.solo("ep"), compute, pad_to=3
    )
    assert shapes == [((9, 2), [3, 3, 3])]
    assert out[:, 0].tolist() == [1, 1, 1, 1, 0]  # the last one is dropped
    with pytest.raises(
        ValueError,
        match=r"expert 0 has 4 rows and pad_to is 3: give at least 4, .*within_capacity",
    ):
        plan_exchange(chosen, 3, Axis.solo("ep"), pad_to=3)


def test_what_does_not_fit_is_named():
    chosen = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="capacity is -1, it must be at least 0"):
        within_capacity(chosen, -1)
    with pytest.raises(ValueError, match=r"experts are \(2, 2\) of torch.int32: give \(T, K\) of"):
        within_capacity(chosen.int(), 1)
    with pytest.raises(ValueError, match=r"weights are \(2,\) and experts \(2, 2\): give one for"):
        within_capacity(chosen, 1, torch.ones(2))
