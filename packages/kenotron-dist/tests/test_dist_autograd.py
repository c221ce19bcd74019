"""Collectives with gradients: against one process, and each backward is the forward's transpose."""

import pytest
import torch

from kenotron_dist import Axis
from kenotron_dist.autograd import (
    all_gather_from,
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from kenotron_dist.testing import on_ranks


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device())


def counts(n):
    """How many rows each rank sends to each: uneven, some none."""
    return [[(source + 2 * to) % 3 for to in range(n)] for source in range(n)]


def linear_maps(axis):
    """Maps from all ranks' inputs to all ranks' outputs, with the shapes of both on this rank."""
    n, me = axis.size, axis.rank
    sends = counts(n)[me]
    receives = [row[me] for row in counts(n)]
    maps = {"all_to_all uneven": (lambda x: all_to_all(x, axis, sends, receives), (sum(sends), 2))}
    for dim in (0, 1, -1):
        shape = (2 * n, 3 * n)
        maps[f"all_gather_from {dim}"] = (lambda x, d=dim: all_gather_from(x, axis, d), shape)
        maps[f"reduce_scatter_to {dim}"] = (lambda x, d=dim: reduce_scatter_to(x, axis, d), shape)
    maps["all_to_all"] = (lambda x: all_to_all(x, axis), (2 * n, 3))
    return maps


def transposes(mesh):
    """<A x, y> and <x, A^T y>, this rank's share of both."""
    axis = mesh["tp"]
    found = {}
    for seed, (name, (apply, shape)) in enumerate(linear_maps(axis).items()):
        x = draw(*shape, seed=100 * seed + axis.rank).requires_grad_()
        out = apply(x)
        y = draw(*out.shape, seed=100 * seed + 50 + axis.rank)
        out.backward(y)
        found[name] = ((out * y).sum().item(), (x * x.grad).sum().item())
    return found


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_backward_is_the_transpose(tp):
    shares = on_ranks(transposes, tp=tp)
    for name in shares[0]:
        forward = sum(share[name][0] for share in shares)
        backward = sum(share[name][1] for share in shares)
        assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12), name
        assert forward != 0


def alike_maps(axis):
    """Ways into and out of a region where every rank computes the same loss of the whole."""
    n, me = axis.size, axis.rank

    def mine(x, dim=-1):
        return x.chunk(n, dim)[me]

    w = draw(3, 2 * n, 5, seed=7)  # one weight a feature: the ranks do different things

    def columns_then_rows(x):
        """Each rank multiplies its own features, the products are summed."""
        return reduce_from(torch.tanh(mine(copy_to(x, axis)) * 2) @ mine(w, 1), axis)

    def whole(x):
        return torch.tanh(x * 2) @ w

    return {
        "copy, reduce": (columns_then_rows, whole),
        "scatter, gather": (
            lambda x: gather_from(scatter_to(x, axis).sin() * (me + 1), axis),
            lambda x: torch.cat([c.sin() * (i + 1) for i, c in enumerate(x.chunk(n, -1))], -1),
        ),
        "scatter, gather of dim 1": (
            lambda x: gather_from(scatter_to(x, axis, 1).exp(), axis, 1),
            torch.exp,
        ),
        "scatter, all-gather and reduce-scatter, gather": (  # sequence parallelism around a sum
            lambda x: gather_from(
                reduce_scatter_to(
                    mine(all_gather_from(scatter_to(x, axis, 1), axis, 1)) @ mine(w, 1), axis, 1
                ),
                axis,
                1,
            ),
            lambda x: x @ w,
        ),
    }


def compare(mesh):
    axis = mesh["tp"]
    for seed, (name, (cut, whole)) in enumerate(alike_maps(axis).items()):
        x = draw(3, 2 * axis.size, 2 * axis.size, seed=seed).requires_grad_()
        twin = x.detach().clone().requires_grad_()
        found, expected = cut(x), whole(twin)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
        y = draw(*expected.shape, seed=9)
        found.backward(y)
        expected.backward(y)
        torch.testing.assert_close(x.grad, twin.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_regions_compute_what_one_process_computes(tp):
    on_ranks(compare, tp=tp)


def awkward(mesh):
    axis = mesh["tp"]
    x = draw(2, 4, seed=0).requires_grad_()
    y = copy_to(x, axis)
    assert y is not x and y.data_ptr() == x.data_ptr()  # no copy is made
    y.sum().expand(3).sum().backward()  # an expanded gradient is not contiguous
    assert x.grad.eq(3 * axis.size).all()
    with torch.no_grad():
        assert not reduce_from(x, axis).requires_grad
    half = x.detach().bfloat16().requires_grad_()
    reduce_scatter_to(all_gather_from(half, axis), axis).sum().backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.eq(axis.size).all()
    errors = []
    for call in (scatter_to, reduce_scatter_to):
        with pytest.raises(ValueError) as error:
            call(torch.zeros(3, 5), axis, 1)
        errors.append(str(error.value))
    return errors


def test_awkward_inputs_and_errors():
    for errors in on_ranks(awkward, tp=2):
        assert errors == [
            "cannot split dim 1 of size 5 over 2 tp ranks",
            "reduce_scatter: cannot split dim 1 of size 5 over 2 tp ranks",
        ]


def test_one_rank_gets_its_own_tensor_back():
    axis, x = Axis.solo("tp"), torch.randn(4, 3, requires_grad=True)
    for verb in (copy_to, reduce_from, gather_from, scatter_to, all_to_all):
        assert verb(x, axis) is x
    assert all_gather_from(x, axis) is x
    assert reduce_scatter_to(x, axis) is x
