"""Gradients of cut layers are clipped as those of the whole model."""

import itertools

import pytest
import torch
from test_tp_model import MODES, batch, begin
from tp_ranks import check_parameters

from kenotron_dist import Axis, clip_gradients, sum_gradients
from kenotron_dist.testing import on_ranks

INF = float("inf")


def clip(mesh, mode, norm_type, max_norm):
    model, whole = begin(mesh["tp"], mode), begin(Axis.solo("tp"), {})
    tokens, labels = batch(0)
    for each in (model, whole):
        each.loss(tokens, labels, fused=False).backward()
    before = whole.head.weight.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
    sum_gradients(model, mesh)
    norm = clip_gradients(model, mesh, max_norm, norm_type)
    torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=0)
    assert torch.equal(before, whole.head.weight.grad) == (max_norm == INF)  # really clipped
    check_parameters(model, whole, mesh, torch.testing.assert_close, summed=True)
    return norm


def clip_all(mesh):
    cases = itertools.product(MODES.values(), (1.0, 2.0, INF), (1e-3, INF))
    return torch.stack([clip(mesh, *case) for case in cases])


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4, "dp": 2}], ids=str)
def test_the_norm_is_that_of_the_whole_model(sizes):
    first, *others = on_ranks(clip_all, seconds=120, **sizes)  # four ranks share two kv heads
    assert all(torch.equal(first, other) for other in others)
