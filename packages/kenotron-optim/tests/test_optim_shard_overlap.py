"""ZeRO stage 3 on a slow network: transfers and computing take the longer of their times.

Every layer computes for a while and every transfer lasts as long by a clock of the test, whatever
the machine does. One after the other they would take their sum.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor, nn

from kenotron_dist import Handle, Mesh, gather_pieces, sum_rows
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator, SlicedOptimizer, decay_groups, parameter_memory
from kenotron_optim import slice_sums as sums_module

LAYERS = 6


class Clock:
    """Counts what lasts: a layer in one direction, or a transfer."""

    now = 0


class Busy(torch.autograd.Function):
    """The identity, which takes a while in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        Clock.now += 1
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        Clock.now += 1
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
    over = Clock.now + 1

    def finish() -> Tensor:
        result = handle.wait()
        Clock.now = max(Clock.now, over)
        return result

    return Handle(None, finish)


def lengths(mesh: Mesh) -> list[tuple[int, int]]:
    """Of the forward and the backward of some steps."""
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(
        named_parameters(model), layouts, mesh, reduce="micro_batch", bucket_mb=1e-4
    )
    optimizer = SlicedOptimizer(grads, torch.optim.SGD, decay_groups(grads.names, 0.0), 3)
    optimizer.overlap_forward(model)
    found = []
    gathers = mock.patch.object(
        parameter_memory, "gather_pieces", lambda *given: arriving(gather_pieces(*given))
    )
    sums = mock.patch.object(sums_module, "sum_rows", lambda *given: arriving(sum_rows(*given)))
    for _ in range(3):
        grads.start(backwards=1)
        with gathers, sums:
            first = Clock.now
            loss = model(torch.ones(2, 8)).sum()
            middle = Clock.now
            loss.backward()
            slices = grads.finish()
            found.append((middle - first, Clock.now - middle))
        optimizer.step(slices, lr=0.1)
    return found


def test_transfers_of_a_layer_are_under_way_while_another_computes() -> None:
    for steps in on_ranks(lengths, dp=2):
        # The first gather of each has nothing to hide behind, nor have the last sums.
        assert steps == [(LAYERS + 1, LAYERS + 2)] * 3
