"""Which rows an exchange moves, and in which order, for many random routings."""

import pytest
import torch

from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks
from kenotron_ep import combine, dispatch, plan_exchange

WAYS = ("alltoall", "once_per_rank", "allgather")


class Routing:
    """The choices of all ranks, a function of the seed."""

    def __init__(self, seed, n):
        draw = torch.Generator().manual_seed(seed)

        def number(low, high):
            return int(torch.randint(low, high, (), generator=draw))

        self.experts, self.top_k = n * number(1, 4), number(1, 5)
        lowest = -1 if number(0, 2) else 0
        highest = number(1, self.experts + 1)  # experts from there on get nothing
        tokens = [number(0, 7) * number(0, 2) for _ in range(n)]
        shapes = [(t, self.top_k) for t in tokens]
        self.chosen = [torch.randint(lowest, highest, s, generator=draw) for s in shapes]

    def rows(self, rank, n):
        """(expert, source, token, k) of each row of a rank, in order."""
        own = self.experts // n
        return [
            (expert, source, token, k)
            for expert in range(rank * own, (rank + 1) * own)
            for source, chosen in enumerate(self.chosen)
            for token in range(len(chosen))
            for k in range(self.top_k)
            if chosen[token, k] == expert
        ]


def check_plan(axis, routing, way, pad):
    n, me = axis.size, axis.rank
    rows, own = routing.rows(me, n), routing.experts // n
    chosen = routing.chosen[me]
    loads = [sum(row[0] == me * own + e for row in rows) for e in range(own)]
    pad_to = max(1, len(rows)) if pad else None
    exchange = plan_exchange(chosen, routing.experts, axis, way=way, pad_to=pad_to)
    assert exchange.loads == tuple(loads)
    assert exchange.counts.tolist() == ([pad_to] * own if pad else loads)
    assert exchange.rows == sum(exchange.counts.tolist())
    assert exchange.receive == tuple(sum(row[1] == s for row in rows) for s in range(n))
    sent = [(e, t * routing.top_k + k) for t, row in enumerate(chosen.tolist())
            for k, e in enumerate(row) if e >= 0]  # fmt: skip
    assert exchange.choices_S.tolist() == [choice for _, choice in sorted(sent)]
    assert exchange.send == tuple(sum(e // own == r for e, _ in sent) for r in range(n))
    # A token is its rank and number, so rows tell where they came from.
    x = torch.tensor([[me + 1.0, t + 1] for t in range(len(chosen))]).view(-1, 2)
    grouped = dispatch(x, exchange)
    parts = grouped.split(exchange.counts.tolist())
    for e, (part, load) in enumerate(zip(parts, loads, strict=True)):
        right = [[s + 1.0, t + 1] for expert, s, t, _ in rows if expert == me * own + e]
        assert part[:load].tolist() == right and (part[load:] == 0).all()
    # An expert returns its number; the weights keep the choices apart.
    numbers = torch.arange(me * own, (me + 1) * own).repeat_interleave(exchange.counts)
    weights = torch.eye(routing.top_k).expand(len(chosen), -1, -1)
    for k in range(routing.top_k):
        found = combine(numbers[:, None].float(), exchange, weights[:, :, k].contiguous())
        assert found.view(-1).tolist() == chosen[:, k].clamp(min=0).tolist()


def check_by_source(axis, routing):
    """Rows of each rank, then of each expert, in the order in which it has them alone."""
    n, me, own = axis.size, axis.rank, routing.experts // axis.size
    exchange = plan_exchange(routing.chosen[me], routing.experts, axis, by_source=True)
    rows = sorted(routing.rows(me, n), key=lambda row: (row[1], row[0]))
    mine = range(me * own, (me + 1) * own)
    counts = [[sum(row[:2] == (e, s) for row in rows) for e in mine] for s in range(n)]
    assert exchange.counts.tolist() == counts and exchange.rows == len(rows)
    x = torch.tensor([[me + 1.0, t + 1] for t in range(len(routing.chosen[me]))]).view(-1, 2)
    assert dispatch(x, exchange).tolist() == [[s + 1.0, t + 1] for _, s, t, _ in rows]
    numbers = torch.tensor([[row[0] + 1.0] for row in rows]).view(-1, 1)
    found = combine(numbers, exchange, torch.ones(len(x), routing.top_k))
    assert found.view(-1).tolist() == (routing.chosen[me] + 1).sum(1).tolist()


def plans(mesh, seeds):
    axis = mesh["ep"]
    for seed in seeds:
        for way in WAYS:
            check_plan(axis, Routing(seed, axis.size), way, pad=seed % 2)
        check_by_source(axis, Routing(seed, axis.size))


@pytest.mark.parametrize("ep", [2, 4])
def test_rows_are_in_global_order_of_expert_and_token(ep):
    on_ranks(plans, range(24), dp=ep, ep=ep)


@pytest.mark.smoke
def test_one_rank_groups_by_expert():
    for seed in range(100):
        check_plan(Axis.solo("ep"), Routing(seed, 1), WAYS[seed % 3], pad=seed % 2)
        check_by_source(Axis.solo("ep"), Routing(seed, 1))


def test_one_plan_serves_several_tensors_and_dtypes():
    exchange = plan_exchange(torch.tensor([[1, 0], [0, 1]]), 2, Axis.solo("ep"))
    for dtype in (torch.float32, torch.bfloat16):
        rows = dispatch(torch.tensor([[1.0], [2.0]], dtype=dtype), exchange)
        assert rows.dtype == dtype and rows.view(-1).tolist() == [1, 2, 1, 2]
        out = combine(rows, exchange, torch.ones(2, 2))
        assert out.dtype == dtype and out.view(-1).tolist() == [2, 4]
