"""Sums have one order and are rounded once; gradients are those of finite differences."""

import pytest
import torch
from ep_cases import Case, by_expert, normal, share

from kenotron_dist import Axis
from kenotron_dist.autograd import gather_from, scatter_to
from kenotron_dist.testing import on_ranks
from kenotron_ep import combine, dispatch, mix_experts, plan_exchange
from kenotron_ep.row_table import RowTable, add_rows, dot_rows, weighted_rows

SOLO = Axis.solo("ep")
WAYS = ("alltoall", "once_per_rank", "allgather")


def test_half_precision_is_added_in_fp32_in_the_order_of_the_choices():
    """1 + 2^-9 does not exist in bf16: only a sum in fp32 gives 2^-9 when 1 is taken away."""
    exchange = plan_exchange(torch.tensor([[2, 0, 1]]), 3, SOLO)
    y = torch.tensor([[2.0**-9], [-1.0], [1.0]], dtype=torch.bfloat16)  # of experts 0, 1, 2
    weights = torch.ones(1, 3, requires_grad=True)
    assert combine(y, exchange, weights).item() == 2**-9
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    dispatch(x, exchange).backward(y)
    assert x.grad.item() == 2**-9
    # The order is that of the choices (2, 0, 1): 1e8 first, then 1, then -1e8 gives 0 in fp32.
    large = torch.tensor([[1.0], [-1e8], [1e8]])
    assert combine(large, exchange, weights).item() == 0
    other = plan_exchange(torch.tensor([[2, 1, 0]]), 3, SOLO)
    assert combine(large, other, weights).item() == 1


def copies_on_the_second_rank(mesh):
    """A token of the first rank whose three experts are on the second."""
    axis, found = mesh["ep"], []
    tokens = 1 if axis.rank == 0 else 0
    for way in WAYS:
        exchange = plan_exchange(torch.tensor([[3, 5, 4]])[:tokens], 6, axis, way=way)
        x = torch.zeros(tokens, 1, requires_grad=True)
        grad = torch.tensor([[1e8], [1.0], [-1e8]])  # of experts 3, 4 and 5
        dispatch(x, exchange).backward(grad[: exchange.rows])
        found += x.grad.view(-1).tolist()
    return found


def test_gradients_of_copies_are_added_in_the_order_of_the_choices():
    """1e8 - 1e8 + 1; in the order of the experts, or of arrival, the 1 is lost."""
    assert on_ranks(copies_on_the_second_rank, dp=2, ep=2)[0] == [1, 1, 1]


def test_weights_of_dropped_choices_do_not_matter():
    exchange = plan_exchange(torch.tensor([[0, -1]]), 1, SOLO)
    weights = torch.tensor([[2.0, torch.inf]], requires_grad=True)
    out = combine(torch.tensor([[3.0]]), exchange, weights)
    out.sum().backward()
    assert out.item() == 6 and weights.grad.tolist() == [[3, 0]]


def test_blocks_do_not_change_a_bit():
    """More elements than a block has, in rows whose number no block divides."""
    rows, features, top_k = 701, 501, 3
    x, y = normal(rows, features, seed=1), normal(rows * top_k, features, seed=2)
    weights = normal(rows, top_k, seed=3)
    order = torch.randperm(rows * top_k, generator=torch.Generator().manual_seed(4))
    table = RowTable(order.view(rows, top_k), False)
    picked = y[order].view(rows, top_k, features)
    total = picked[:, 0] * weights[:, 0, None]
    for k in range(1, top_k):
        total = total + picked[:, k] * weights[:, k, None]
    assert torch.equal(add_rows(y, table, weights), total)
    tokens = order % rows
    flat = weights.reshape(-1)
    assert torch.equal(weighted_rows(x, tokens, flat), x[tokens] * flat[:, None])
    expected = (x[tokens].double() * y.double()).sum(-1)
    dots = dot_rows(x, tokens, y, torch.float32)
    torch.testing.assert_close(dots.double(), expected, rtol=1e-5, atol=1e-4)


def test_gradients_that_reach_a_grouped_product_are_contiguous():
    found = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append(x.is_contiguous())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            found.append(grad.is_contiguous())
            return grad * 2

    for pad_to in (None, 9):
        x, weights = normal(4, 6, seed=1).T.requires_grad_(), torch.ones(6, 1)
        chosen = torch.tensor([[0], [1], [0], [0], [1], [0]])
        mixed = mix_experts(x, chosen, weights, 2, SOLO, lambda r, c: Look.apply(r), pad_to=pad_to)
        mixed.sum().backward()  # an expanded gradient
    assert found == [True] * 4


@pytest.mark.parametrize("pad_to", [None, 16])
def test_a_grouped_product_takes_the_rows_and_an_empty_expert_has_a_zero_gradient(pad_to):
    chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0]])  # expert 2 has no tokens
    x, weights = normal(4, 16, seed=1, dtype=torch.bfloat16), torch.ones(4, 2)
    found = []
    for grouped in (True, False):
        matrices = normal(4, 16, 16, seed=2, dtype=torch.bfloat16).requires_grad_()

        def compute(rows, counts, grouped=grouped, matrices=matrices):
            if grouped:
                ends = counts.cumsum(0).to(torch.int32)
                return torch._grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
            parts = zip(rows.split(counts.tolist()), matrices, strict=True)
            return torch.cat([part @ matrix.T for part, matrix in parts])

        out = mix_experts(x, chosen, weights, 4, SOLO, compute, pad_to=pad_to)
        out.sum().backward()
        found.append((out.detach(), matrices.grad))
        assert (matrices.grad[2] == 0).all() and matrices.grad.isfinite().all()
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


def fp64(case):
    """Leaves in fp64, choices apart."""
    x, chosen, weights, _ = case.tensors()
    return [x.requires_grad_(), weights.requires_grad_(), *case.parameters()], chosen


CASE = Case("dropped", 3, 8, True, torch.float64, torch.float64, 4)


@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"pad_to": 24}])
def test_gradients_are_those_of_finite_differences(options):
    (x, weights, *parameters), chosen = fp64(CASE)

    def mixed(x, weights, *parameters):
        compute = by_expert(parameters, True)
        return mix_experts(x, chosen, weights, 4, SOLO, compute, **options)

    leaves = (x, weights, *(each.requires_grad_() for each in parameters))
    assert torch.autograd.gradcheck(mixed, leaves)


def gradcheck_on_ranks(mesh):
    """The same perturbation of the tokens on all ranks, through a cut and a gather."""
    axis = mesh["ep"]
    (x, weights, *parameters), chosen = fp64(CASE)
    compute = by_expert(share(parameters, axis), True)
    for way in WAYS:

        def mixed(x, weights, way=way):
            parts = scatter_to(x, axis, 0), chosen.chunk(2)[axis.rank], scatter_to(weights, axis, 0)
            out = mix_experts(*parts, 4, axis, compute, way=way, chunks=3)
            return gather_from(out, axis, 0)

        assert torch.autograd.gradcheck(mixed, (x, weights), fast_mode=True)


def test_gradients_are_those_of_finite_differences_on_two_ranks():
    on_ranks(gradcheck_on_ranks, dp=2, ep=2)


def test_second_derivatives_are_refused():
    x = normal(3, 2, seed=1).requires_grad_()
    out = mix_experts(
        x, torch.tensor([[0], [0], [0]]), torch.ones(3, 1), 1, SOLO, lambda rows, _: rows**3
    )
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
