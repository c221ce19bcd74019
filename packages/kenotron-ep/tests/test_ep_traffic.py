"""Bytes that leave a rank, as the formulas say and as the recorder counts them."""

from itertools import combinations

import pytest
import torch
from ep_cases import normal, own, routed

from kenotron_dist.diagnosis import record
from kenotron_dist.testing import on_ranks
from kenotron_ep import (
    ExchangeSize,
    combine,
    dispatch,
    exchange_traffic,
    mix_experts,
    plan_exchange,
    planned_traffic,
)

WAYS = ("alltoall", "once_per_rank", "allgather")


def counted(mesh):
    axis = mesh["ep"]
    for way in WAYS:
        for dtype in (torch.float32, torch.bfloat16):
            x = own(normal(40, 6, seed=1, dtype=dtype), axis).requires_grad_()
            chosen = own(routed("dropped", 40, 8, 3), axis)
            weights = torch.ones(chosen.shape, requires_grad=True)
            found = []
            with record(mesh) as recorder:

                def sent(found=found, recorder=recorder):
                    found.append(recorder.bytes_per_axis(recorder.cut()).get("ep", 0))

                exchange = plan_exchange(chosen, 8, axis, way=way, pad_to=50)
                sent()
                out = combine(dispatch(x, exchange)[:, :4] * 2, exchange, weights)
                sent()
                out.sum().backward()
                sent()
            assert tuple(found) == planned_traffic(exchange, 6, dtype, 4), way


@pytest.mark.parametrize("ep", [2, 4])
def test_the_recorder_counts_what_the_plan_says(ep):
    on_ranks(counted, dp=ep, ep=ep)


def balanced(mesh):
    """Every pair of 8 experts once: 28 tokens on each rank."""
    axis, found = mesh["ep"], {}
    chosen = torch.tensor(list(combinations(range(8), 2)))
    x = normal(28, 16, seed=1).requires_grad_()
    weights = torch.ones(28, 2, requires_grad=True)
    for way in WAYS:
        with record(mesh) as recorder:
            mixed = mix_experts(x, chosen, weights, 8, axis, lambda rows, _: rows * 2, way=way)
            mixed.sum().backward()
            found[way] = recorder.bytes_per_axis()["ep"]
    return found


@pytest.mark.parametrize("ep", [2, 4])
def test_a_balanced_router_sends_what_the_formula_says(ep):
    size = ExchangeSize(28, 2, 16, 8, torch.float32)
    for found in on_ranks(balanced, dp=ep, ep=ep):
        assert found == {way: pytest.approx(sum(exchange_traffic(size, ep, way))) for way in WAYS}


def test_the_formula_in_closed_form():
    for n in (1, 2, 4, 8):
        size = ExchangeSize(1024, 2, 512, 64)
        plan, *moved = exchange_traffic(size, n)
        assert sum(moved) == 4 * 1024 * 2 * 512 * 2 * (n - 1) / n
        assert plan == (n - 1) * (64 / n + 1) * 8
    many = ExchangeSize(1024, 8, 512, 64)
    ways = [exchange_traffic(many, 4, way).forward for way in WAYS]
    assert ways[1] < ways[2] < ways[0]  # K > n


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="3 of 8 experts on 3 ranks: the ranks must divide"):
        exchange_traffic(ExchangeSize(4, 3, 8, 8), 3)
    with pytest.raises(ValueError, match="exchange_traffic: way 'star' is not alltoall, once_per_"):
        exchange_traffic(ExchangeSize(4, 3, 8, 9), 3, "star")
