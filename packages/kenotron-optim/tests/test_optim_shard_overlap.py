"""ZeRO stage 3 on a slow network: transfers and computing take the longer of their times.

Every layer computes for a while and every transfer lasts as long, whatever the machine does: both
sleep. One after the other they would take their sum.
"""

from __future__ import annotations

import time
from unittest import mock

import torch
from torch import Tensor, nn

from kenotron_dist import Handle, Mesh, gather_pieces, named_parameters, parameter_layouts, sum_rows
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator, SlicedOptimizer, decay_groups, parameter_shards
from kenotron_optim import slice_sums as sums_module

LAYERS, LASTS, TRIES = 6, 0.08, 3


class Busy(torch.autograd.Function):
    """The identity, which takes a while in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        time.sleep(LASTS)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        time.sleep(LASTS)
        return gradient


class Layer(nn.Module):
    """A product that takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Busy.apply(self.linear(x))


def arriving(handle: Handle) -> Handle:
    """The same transfer, which is over a while after its start at the earliest."""
    over = time.monotonic() + LASTS

    def finish() -> Tensor:
        result = handle.wait()
        time.sleep(max(0.0, over - time.monotonic()))
        return result

    return Handle(None, finish)


def seconds(mesh: Mesh) -> tuple[float, float]:
    """Of a forward and of a backward, the shortest of some."""
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(
        named_parameters(model), layouts, mesh, reduce="micro_batch", bucket_mb=1e-4
    )
    optimizer = SlicedOptimizer(grads, torch.optim.SGD, decay_groups(grads.names, 0.0), 3)
    optimizer.overlap_forward(model)
    found = []
    gathers = mock.patch.object(
        parameter_shards, "gather_pieces", lambda *given: arriving(gather_pieces(*given))
    )
    sums = mock.patch.object(sums_module, "sum_rows", lambda *given: arriving(sum_rows(*given)))
    for _ in range(TRIES):
        grads.start(backwards=1)
        with gathers, sums:
            first = time.monotonic()
            loss = model(torch.ones(2, 8)).sum()
            middle = time.monotonic()
            loss.backward()
            slices = grads.finish()
            found.append((middle - first, time.monotonic() - middle))
        optimizer.step(slices, lr=0.1)
    forward, backward = zip(*found, strict=True)
    return min(forward), min(backward)


def test_transfers_of_a_layer_are_under_way_while_another_computes() -> None:
    for forward, backward in on_ranks(seconds, dp=2):
        ways = LAYERS * LASTS
        assert ways <= forward < 1.6 * ways  # the first gather has nothing to hide behind
        assert ways <= backward < 1.9 * ways  # and the last sum; two sums a layer
