"""Sums that start during the last backward: the same bits, whatever the order of gradients."""

from unittest import mock

import pytest
import torch
from torch import nn

from kenotron_dist import Axis
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator, reduction
from kenotron_optim.data_axes import DataAxes

KB = 1 / 1024


class Branches(nn.Module):
    """Branches whose backwards run in any order; some may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = (3, 7, 1, 30, 5, 12)  # uneven for every number of ranks
        self.branches = nn.ModuleList(nn.Linear(4, size) for size in sizes)

    def backward(self, x, order):
        for i in order:  # one graph each: gradients come in this order
            self.branches[i](x).square().sum().backward()


def accumulator(model, mesh, **options):
    layouts = parameter_layouts(model, mesh.sizes)
    return GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=0.2 * KB, **options)


def batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, 5, 4, generator=generator)


def run(mesh, grads, model, backwards, announced, order):
    """Slices, and whether a sum had started before ``finish``."""
    pulse = mesh["dp"].pulse
    before = pulse.last
    grads.start(announced)
    for x in batches(mesh.rank, backwards):
        model.backward(x, order)
    early = pulse.last is not before
    return {name: slice_.clone() for name, slice_ in grads.finish().items()}, early


def orders(mesh):
    """Every rank has its own order, and one leaves a branch out: the sums of one order."""
    model, found = Branches(), []
    for fp32 in (True, False):
        grads = accumulator(model, mesh, fp32=fp32)
        assert len(grads.buckets) > 3
        for backwards in (1, 2, 5):
            straight = list(reversed(range(6)))
            expected, early = run(mesh, grads, model, backwards, None, straight)
            assert not early
            same, early = run(mesh, grads, model, backwards, backwards, straight)
            found.append(early)
            turned = straight[mesh.rank :] + straight[: mesh.rank]
            other, _ = run(mesh, grads, model, backwards, backwards, turned)
            for name, slice_ in expected.items():
                assert torch.equal(slice_, same[name]) and torch.equal(slice_, other[name]), name
            without = [i for i in straight if i != 3 or mesh.rank]
            missing, _ = run(mesh, grads, model, backwards, backwards, without)
            expected, _ = run(mesh, grads, model, backwards, None, without)
            assert all(torch.equal(expected[name], missing[name]) for name in expected)
            nothing, _ = run(mesh, grads, model, backwards, backwards, [])
            assert not any(slice_.any() for slice_ in nothing.values())
        for parameter in model.parameters():
            parameter._post_accumulate_grad_hooks.clear()
    return all(found)


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_the_order_of_gradients_changes_no_bit(dp):
    assert on_ranks(orders, dp=dp) == [dp > 1] * dp


def misuse(mesh):
    model = Branches()
    grads = accumulator(model, mesh)
    x = batches(0, 1)[0]
    grads.start(backwards=1)
    model.backward(x, [2])
    with pytest.raises(RuntimeError, match=r"'branches.2.bias' got gradient number 2, but start"):
        model.branches[2].bias.sum().backward()
    grads.finish()
    with pytest.raises(RuntimeError, match=r"finish\(\) was called before: a step begins with"):
        grads.finish()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"'branches.2.bias' got a gradient after finish\(\)"):
        model.branches[2].bias.sum().backward()
    model.zero_grad()
    grads.start()
    model.backward(x, [2])


def test_a_gradient_too_many_is_an_error():
    on_ranks(misuse)


@pytest.mark.parametrize(("backend", "waited"), [("nccl", 0), ("gloo", 6)])
def test_sums_wait_for_one_another_only_where_memory_is_reused(backend, waited):
    handles = []

    def started(*_):
        handles.append(mock.Mock())
        return handles[-1]

    axis = Axis("dp", 0, (0, 1, 2), backend=backend)
    buffers = [torch.zeros(3, 4) for _ in range(8)]
    with mock.patch.object(reduction, "sum_slices", side_effect=started):
        sums = reduction.Reduction(buffers, [DataAxes(axis)] * 8, early=8)
        for bucket in range(8):
            sums.ready(bucket)
    assert [handle.wait.call_count for handle in handles] == [1] * waited + [0] * (8 - waited)
    sums.finish()
    assert all(handle.wait.call_count == 1 for handle in handles)


@pytest.mark.gloo(reason="NCCL adds an element in an order that depends on its place")
def test_the_size_of_buckets_changes_no_bit():
    one, other = (on_ranks(sliced_in, mb, dp=3) for mb in (0.2 * KB, None))
    assert one == other


def sliced_in(mesh, bucket_mb):
    model = Branches()
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=bucket_mb)
    grads.start(1)
    model.backward(batches(mesh.rank, 1)[0], range(6))
    return {name: slice_.tolist() for name, slice_ in grads.finish().items()}
