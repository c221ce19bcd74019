"""Gradients of the two products in fp64 against finite differences over all ranks together."""

import pytest
import torch
from tp_ranks import normal

from kenotron_dist import all_reduce
from kenotron_dist.testing import on_ranks
from kenotron_tp import ColumnParallelLinear, RowParallelLinear

STEP = 1e-6
MODES = [
    {},
    {"overlap": True},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "overlap": True},
]


def differences(mesh, loss, leaf, shared):
    """d loss / d leaf, where ``loss`` is the same on every rank; shared leaves move together."""
    axis, found = mesh["tp"], torch.zeros_like(leaf)
    with torch.no_grad():
        for owner in [None] if shared else range(axis.size):
            for i in range(leaf.numel()):
                ends = []
                for sign in (1, -1):
                    moves = owner in (None, axis.rank)
                    if moves:
                        leaf.view(-1)[i] += sign * STEP
                    ends.append(loss())
                    if moves:
                        leaf.view(-1)[i] -= sign * STEP
                if owner in (None, axis.rank):
                    found.view(-1)[i] = (ends[0] - ends[1]) / (2 * STEP)
    return found


def check(mesh, kind, mode):
    axis, sequence = mesh["tp"], mode.get("sequence_parallel", False)
    tokens = 2 * axis.size - 1
    torch.manual_seed(0)
    options = {"bias": True, "dtype": torch.float64, **mode}
    if kind == "column":
        layer = ColumnParallelLinear(2, 2 * axis.size, axis, **options)
        x = normal(2 if sequence else tokens, 2, seed=axis.rank * sequence, dtype=torch.float64)
        call = {"tokens": tokens}
    else:
        layer = RowParallelLinear(2 * axis.size, 2, axis, **options)
        x = normal(tokens, 2, seed=axis.rank, dtype=torch.float64)
        call = {}
    weight = normal(tokens + 1, 2, seed=7 + axis.rank, dtype=torch.float64)
    whole = kind == "row" and not sequence  # every rank has the same result: it counts once

    def own():
        y = layer(x, **call)
        of = normal(*y.shape, seed=9, dtype=torch.float64) if whole else weight[: len(y)]
        return (y.sin() * of).sum()

    def loss():
        return own() if whole else all_reduce(own().detach(), axis)

    x.requires_grad_()
    own().backward()
    shared_x = kind == "column" and not sequence
    torch.testing.assert_close(x.grad, differences(mesh, loss, x, shared_x), rtol=1e-6, atol=1e-8)
    cut = differences(mesh, loss, layer.weight, False)
    torch.testing.assert_close(layer.weight.grad, cut, rtol=1e-6, atol=1e-8)
    bias = layer.bias.grad
    if kind == "row" and sequence:
        bias = all_reduce(bias, axis)  # partial, as its placement says
    cut = differences(mesh, loss, layer.bias, kind == "row")
    torch.testing.assert_close(bias, cut, rtol=1e-6, atol=1e-8)


def check_all(mesh):
    for kind in ("column", "row"):
        for mode in MODES:
            check(mesh, kind, mode)
    check(mesh, "column", {"sequence_parallel": True, "regather": True})


@pytest.mark.parametrize("tp", [2, 3])
def test_gradients_are_those_of_finite_differences(tp):
    on_ranks(check_all, tp=tp)
