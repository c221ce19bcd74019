"""With overlap a step takes the longer of communication and products, not their sum.

Time is counted, not measured: what computes moves a rank's clock on, what is waited for moves it to
the time of arrival.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tp_ranks import normal

from kenotron_dist import collectives, handle, point_to_point
from kenotron_dist.testing import on_ranks
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, cross_entropy

PRODUCT, DELAY = 0.12, 0.05  # of a whole product, of a message
TOKENS, WIDTH = 32, 16
FLOPS = TOKENS * WIDTH * WIDTH // 2  # of a product of one of two ranks
MESSAGES = {"sequence": 4, "regather": 5, "whole": 2}


class Clock:
    """The time of this rank."""

    now = 0.0


class SlowProducts(TorchDispatchMode):
    """Every matrix product takes time in proportion to its size."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            x, w = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            Clock.now += PRODUCT * x.numel() * w.shape[1] / FLOPS
        return func(*args, **(kwargs or {}))


class SlowFlight:
    """A communication that lands no sooner than ``DELAY`` after its start."""

    def __init__(self, start, *args, **options):
        self.flight, self.end = start(*args, **options), Clock.now + DELAY

    def land(self):
        self.flight.land()
        Clock.now = max(Clock.now, self.end)


def slow_communication():
    """Patches of the two functions that every message goes through."""
    patches = []
    for module in (collectives, point_to_point):
        for name in ("start", "start_exchange"):
            if hasattr(module, name):
                slow = functools.partial(SlowFlight, getattr(handle, name))
                patches.append(mock.patch.object(module, name, slow))
    return patches


def time_of(run):
    """How far the clock goes on, with everything slowed."""
    with contextlib.ExitStack() as slowed:
        for patch in slow_communication():
            slowed.enter_context(patch)
        slowed.enter_context(SlowProducts())
        begin = Clock.now
        run()
        return Clock.now - begin


def pair(axis, overlap, sequence, regather):
    torch.manual_seed(0)
    options = {"sequence_parallel": sequence, "overlap": overlap}
    column = ColumnParallelLinear(WIDTH, WIDTH, axis, regather=regather, **options)
    row = RowParallelLinear(WIDTH, WIDTH, axis, **options)
    rows = TOKENS // axis.size if sequence else TOKENS
    x = normal(rows, WIDTH, seed=1).requires_grad_()
    return lambda: row(column(x)).sum().backward()


def head(axis, chunk):
    """Two chunks: the sum of the first is hidden, that of the second only by its own product."""
    x = normal(TOKENS, WIDTH, seed=1).requires_grad_()
    w = normal(WIDTH // 2, WIDTH, seed=2).requires_grad_()
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    return lambda: cross_entropy(x, labels, axis, weight=w, chunk=chunk)[0].sum().backward()


def compare(mesh, mode):
    axis = mesh["tp"]
    options = {"sequence": mode in ("sequence", "regather"), "regather": mode == "regather"}
    return [time_of(pair(axis, overlap, **options)) for overlap in (False, True)]


@pytest.mark.parametrize("mode", list(MESSAGES))
def test_the_longer_not_the_sum(mode):
    products = 6 * PRODUCT
    hidden = MESSAGES[mode] * DELAY
    for apart, together in on_ranks(compare, mode, tp=2):
        assert apart == pytest.approx(products + hidden)
        left = hidden / 2 if mode == "whole" else 0  # in forward nothing hides a sum
        assert together == pytest.approx(products + left)


def measure_head(mesh):
    return time_of(head(mesh["tp"], TOKENS // 2))


def test_the_head_hides_its_sums():
    """Four products (the logits twice) and one all-gather; no all-reduce is waited for in vain."""
    for found in on_ranks(measure_head, tp=2):
        assert found <= 4 * PRODUCT + DELAY
