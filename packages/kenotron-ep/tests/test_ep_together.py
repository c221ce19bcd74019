"""All ranks take part in every communication, whatever they have to compute."""

import pytest
import torch
from ep_cases import Case, by_expert, normal, run, share
from torch.utils.checkpoint import checkpoint

from kenotron_dist.diagnosis import record
from kenotron_dist.testing import on_ranks
from kenotron_ep import mix_experts

CASE = Case("random", 2, 24, True)


def forms(mesh):
    """The operations of one layer, forward and backward, in order."""
    found = {}
    for name, case in {"some": CASE, "none": Case(tokens=0), "one": Case("one", 1, 9)}.items():
        for way in ("alltoall", "once_per_rank", "allgather"):
            with record(mesh) as recorder:
                run(case, mesh["ep"], way=way, chunks=3)
                found[name, way] = [
                    (entry.ticket.operation, entry.dtype) for entry in recorder.entries
                ]
    return found


def test_ranks_communicate_in_one_order():
    first, *others = on_ranks(forms, dp=4, ep=4)  # some ranks have no tokens, some no rows
    assert all(found == first for found in others)
    for (name, way), operations in first.items():
        extra = {"alltoall": 1, "once_per_rank": 4, "allgather": 4}[way]
        skipped = 6 if way == "allgather" and name == "none" else 0  # gathers of nothing
        assert len(operations) == extra + 12 - skipped, (name, way)


def unconnected(mesh):
    """A rank without rows returns a new tensor, which depends on nothing."""
    axis = mesh["ep"]
    parameters = share(CASE.parameters(), axis)
    loop = by_expert(parameters, True)

    def compute(rows, counts):
        return loop(rows, counts) if len(rows) else torch.zeros(0, 5)

    found = []
    for frozen in ("", "x", "weights"):
        x = normal(6, 6, seed=1).requires_grad_(frozen != "x")
        weights = torch.ones(6, 1).requires_grad_(frozen != "weights")
        chosen = torch.full((6, 1), 1)  # an expert of the first rank
        mix_experts(x, chosen, weights, 8, axis, compute, chunks=2).sum().backward()
        found.append([each.grad for each in (x, weights)])
    return found, parameters[0].grad


@pytest.mark.smoke
def test_a_rank_without_rows_takes_part_in_the_backward_pass():
    (found, grad), (others, none) = on_ranks(unconnected, dp=2, ep=2)
    for ours, theirs in zip(found, others, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert found[1][0] is None and found[2][1] is None
    assert grad.any() and none is None


def modes(mesh):
    """With recompute, and where nothing or little needs a gradient."""
    axis = mesh["ep"]
    x, weights = normal(7, 6, seed=1), normal(7, 2, seed=2)
    chosen = torch.arange(14).view(7, 2) % 8
    parameters = share(CASE.parameters(), axis)

    def layer(x, weights):
        compute = by_expert(parameters, True)
        return mix_experts(x, chosen, weights, 8, axis, compute, way="once_per_rank", chunks=2)

    def gradients(call, *which):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *parameters]
        given = [leaf if i in which else leaf.detach() for i, leaf in enumerate(leaves[:2])]
        return torch.autograd.grad(call(*given).sum(), [leaves[i] for i in which])

    everything = gradients(layer, 0, 1, 2, 3)

    def recomputed(*args):
        return checkpoint(layer, *args, use_reentrant=False)

    assert all(map(torch.equal, gradients(recomputed, 0, 1, 2, 3), everything))
    assert torch.equal(gradients(recomputed, 2)[0], everything[2])
    for which in ((0,), (1,), (2, 3)):
        for i, grad in zip(which, gradients(layer, *which), strict=True):
            assert torch.equal(grad, everything[i])
    with torch.no_grad():
        assert not layer(x, weights).requires_grad
    frozen = mix_experts(x, chosen, weights, 8, axis, lambda rows, _: rows)
    assert not frozen.requires_grad
    # Twice through one graph.
    leaf = x.clone().requires_grad_()
    out = layer(leaf, weights)
    first = torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), leaf)[0], first)


@pytest.mark.parametrize("ep", [1, 2])
def test_recompute_and_frozen_inputs(ep):
    on_ranks(modes, dp=ep, ep=ep)
