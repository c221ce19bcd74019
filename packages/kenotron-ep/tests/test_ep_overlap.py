"""With chunks a layer takes the longer of communication and products, not their sum.

Time is counted, not measured: what computes moves the clock on, what is waited for moves it to the
time of arrival.
"""

import contextlib
from unittest import mock

import pytest
import torch

from kenotron_dist import Axis, all_to_all
from kenotron_ep import (
    combine,
    combining,
    dispatch,
    mix_experts,
    plan_exchange,
    routes,
    start_dispatch,
)

TOKENS, PRODUCT, DELAY = 60, 12.0, 6.0  # of all tokens' products, of a message with all tokens


class Clock:
    """The time of this rank."""

    now = 0.0


class SlowHandle:
    """A communication that arrives some time after its start."""

    def __init__(self, handle, delay):
        self.handle, self.end = handle, Clock.now + delay

    def wait(self):
        Clock.now = max(Clock.now, self.end)
        return self.handle.wait()


def slow_all_to_all(x, *args, **options):
    return SlowHandle(all_to_all(x, *args, **options), DELAY * len(x) / TOKENS)


class Product(torch.autograd.Function):
    """Takes time in proportion to its rows, in both directions."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds * len(x) / TOKENS
        Clock.now += ctx.seconds
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Clock.now += ctx.seconds
        return grad * 2, None


@contextlib.contextmanager
def slowed():
    """Everything slow; yields what tells the time since the last call."""
    with contextlib.ExitStack() as stack:
        for module in (routes, combining):
            stack.enter_context(mock.patch.object(module, "all_to_all", slow_all_to_all))
        last = [Clock.now]

        def passed():
            begin, last[0] = last[0], Clock.now
            return Clock.now - begin

        yield passed


def inputs():
    x = torch.randn(TOKENS, 3).requires_grad_()
    return x, torch.arange(TOKENS)[:, None] % 4, torch.ones(TOKENS, 1).requires_grad_()


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_the_longer_not_the_sum(chunks):
    """Only the first message and the last one have nothing to hide behind, in both directions."""
    axis = Axis.solo("ep")
    with slowed() as passed:
        compute = lambda rows, _: Product.apply(rows, PRODUCT)  # noqa: E731
        out = mix_experts(*inputs(), 4, axis, compute, chunks=chunks)
        assert passed() == pytest.approx(PRODUCT + 2 * DELAY / chunks)
        out.sum().backward()
        assert passed() == pytest.approx(PRODUCT + 2 * DELAY / chunks)


def test_slow_messages_hide_products():
    axis = Axis.solo("ep")
    with slowed() as passed:
        compute = lambda rows, _: Product.apply(rows, DELAY / 4)  # noqa: E731
        out = mix_experts(*inputs(), 4, axis, compute, chunks=3)
        assert passed() < 2 * DELAY
        out.sum().backward()
        assert passed() < 2 * DELAY


def test_shared_experts_are_computed_during_the_dispatch():
    x, chosen, weights = inputs()
    with slowed() as passed:
        exchange = plan_exchange(chosen, 4, Axis.solo("ep"))
        started = start_dispatch(x, exchange)
        shared = Product.apply(x, PRODUCT)
        out = combine(started.wait(), exchange, weights) + shared
        assert passed() == pytest.approx(PRODUCT + DELAY)  # the dispatch is hidden
        out.sum().backward()
        assert passed() == pytest.approx(PRODUCT + DELAY)
        alone = Product.apply(x, PRODUCT)
        (combine(dispatch(x, exchange), exchange, weights) + alone).sum().backward()
        assert passed() == pytest.approx(2 * PRODUCT + 4 * DELAY)


@pytest.mark.parametrize(("chunks", "messages"), [(1, 1), (3, 2)])
def test_what_is_computed_meanwhile_hides_the_first_dispatch(chunks, messages):
    """Of one chunk the results alone are waited for; of three also the other two messages."""
    x, chosen, weights = inputs()
    shared = []
    with slowed() as passed:
        out = mix_experts(
            x, chosen, weights, 4, Axis.solo("ep"), lambda rows, _: rows * 3, chunks=chunks,
            meanwhile=lambda: shared.append(Product.apply(x, PRODUCT)),
        )  # fmt: skip
        assert len(shared) == 1
        assert passed() == pytest.approx(PRODUCT + DELAY * messages / chunks)
        (out + shared[0]).sum().backward()
        assert passed() == pytest.approx(PRODUCT + DELAY * messages / chunks)
    assert x.grad.eq(5).all()
