"""With overlap a step takes the longer of communication and products, not their sum."""

import functools
import time
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tp_ranks import normal, on_ranks

from kenotron_dist import barrier, collectives, handle, transfers
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, linear_cross_entropy

PRODUCT, DELAY = 0.12, 0.05  # seconds: of a whole product, of a message
TOKENS, WIDTH = 32, 16
FLOPS = TOKENS * WIDTH * WIDTH // 2  # of a product of one of two ranks
MESSAGES = {"sequence": 4, "regather": 5, "whole": 2}


class SlowProducts(TorchDispatchMode):
    """Every matrix product takes time in proportion to its size."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            x, w = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            time.sleep(PRODUCT * x.numel() * w.shape[1] / FLOPS)
        return func(*args, **(kwargs or {}))


class SlowFlight:
    """A communication that lands no sooner than ``DELAY`` after its start."""

    def __init__(self, start, *args):
        self.flight, self.end = start(*args), time.monotonic() + DELAY

    def land(self):
        self.flight.land()
        time.sleep(max(self.end - time.monotonic(), 0))


def slow_communication():
    """Patches of the two functions that every message goes through."""
    patches = []
    for module in (collectives, transfers):
        for name in ("start", "start_exchange"):
            if hasattr(module, name):
                slow = functools.partial(SlowFlight, getattr(handle, name))
                patches.append(mock.patch.object(module, name, slow))
    return patches


def seconds(mesh, run):
    """The quickest of some runs, with everything slowed."""
    best = float("inf")
    for _ in range(3):
        barrier(mesh["tp"])
        patches = slow_communication()
        for patch in patches:
            patch.start()
        begin = time.monotonic()
        with SlowProducts():
            run()
        best = min(best, time.monotonic() - begin)
        for patch in patches:
            patch.stop()
    return best


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
    return lambda: linear_cross_entropy(x, w, labels, axis, chunk=chunk).sum().backward()


def compare(mesh, mode):
    axis = mesh["tp"]
    options = {"sequence": mode in ("sequence", "regather"), "regather": mode == "regather"}
    return [seconds(mesh, pair(axis, overlap, **options)) for overlap in (False, True)]


@pytest.mark.parametrize("mode", list(MESSAGES))
def test_the_longer_not_the_sum(mode):
    products = 6 * PRODUCT
    hidden = MESSAGES[mode] * DELAY
    for apart, together in on_ranks(compare, mode, tp=2):
        assert apart > products + hidden
        if mode == "whole":  # in forward there is nothing to hide a sum behind
            hidden /= 2
        assert apart - together > 0.7 * hidden, (apart, together)


def measure_head(mesh):
    return seconds(mesh, head(mesh["tp"], TOKENS // 2))


def test_the_head_hides_its_sums():
    """Four products (the logits twice) and one all-gather; no all-reduce is waited for in vain."""
    for found in on_ranks(measure_head, tp=2):
        assert found < 4 * PRODUCT + 1.8 * DELAY, found
