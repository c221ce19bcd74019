"""Sums and gathers in place: the bits of what allocates, and nothing else touched."""

import pytest
import torch

from kenotron_dist import Axis, gather_pieces, gather_rows, reduce_scatter, sum_rows
from kenotron_dist.testing import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def draw(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def sums(mesh):
    axis = mesh["dp"]
    n, me = axis.size, axis.rank
    for dtype in DTYPES:
        for width in (0, 1, 5, 40_000, 700_001):
            rows = draw(me, n, width, dtype=dtype)
            before, expected = rows.clone(), reduce_scatter(rows, axis)[0]
            for room in (None, torch.full((n - 1, width), torch.nan, dtype=dtype)):
                rows.copy_(before)
                found = sum_rows(rows, axis, room).wait()
                assert found.data_ptr() == rows[me].data_ptr() or not width
                assert torch.equal(rows[me], expected)
                others = [i for i in range(n) if i != me]
                assert torch.equal(rows[others], before[others])


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5])
def test_a_row_becomes_the_sum_of_that_row(dp):
    on_ranks(sums, dp=dp)


def gathers(mesh):
    axis = mesh["dp"]
    n, me = axis.size, axis.rank
    for dtype in DTYPES:
        for width in (0, 3, 600_000):
            whole = torch.stack([draw(i, width, dtype=dtype) for i in range(n)])
            rows = torch.full_like(whole, 7)
            rows[me] = whole[me]
            assert gather_rows(rows, axis).wait() is rows
            assert torch.equal(rows, whole)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_rows_are_gathered_where_they_are(dp):
    on_ranks(gathers, dp=dp)


def pieces(mesh):
    """Ranges of flattened tensors, large and small, of several dtypes, uneven and empty."""
    axis = mesh["dp"]
    n, me = axis.size, axis.rank
    sizes = [
        (300_001, torch.float32),
        (7, torch.bfloat16),
        (70_000, torch.float64),
        (1, torch.float32),
    ]
    whole = [draw(k, size, dtype=dtype) for k, (size, dtype) in enumerate(sizes)]
    mine = [torch.full_like(x, 9) for x in whole]

    def cut(x, rank):
        size = -(-len(x) // n)
        return x[rank * size : (rank + 1) * size]

    for x, y in zip(mine, whole, strict=True):
        cut(x, me).copy_(cut(y, me))
    flights = [gather_pieces([[cut(x, i)] for i in range(n)], axis) for x in mine[:1]]
    flights.append(gather_pieces([[cut(x, i) for x in mine[1:]] for i in range(n)], axis))
    for flight in reversed(flights):
        flight.wait()
    for x, y in zip(mine, whole, strict=True):
        assert torch.equal(x, y)
    gather_pieces([[] for _ in range(n)], axis).wait()


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_pieces_are_gathered_where_they_are(dp):
    on_ranks(pieces, dp=dp)


def test_there_is_one_row_or_list_for_each_rank():
    axis = Axis("dp", 0, (0, 1))
    for call in (sum_rows, gather_rows):
        for rows in (torch.zeros(3, 2), torch.zeros(()), torch.zeros(2, 4).t()[:2]):
            with pytest.raises(
                ValueError, match="must be contiguous, one for each of the 2 dp ranks"
            ):
                call(rows, axis)
    with pytest.raises(ValueError, match="gather_pieces: 1 lists for 2 dp ranks: give one each"):
        gather_pieces([[torch.zeros(1)]], axis)
