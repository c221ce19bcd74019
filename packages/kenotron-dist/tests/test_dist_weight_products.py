"""Weight-gradient products: who takes them, and what is added."""

import pytest
import torch
from torch import nn

from kenotron_dist import WeightQueue, weight_products
from kenotron_dist.weight_products import add_product, adds_in_fp32, set_taker, taker_of


def parameter():
    return nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_added_in_fp32_or_replaces(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 5).to(dtype), torch.randn(5, 3).to(dtype)
    want = a.double() @ b.double()
    out = torch.full((2, 3), torch.nan)
    add_product(out, a, b, replaces=True)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)
    add_product(out, a, b)
    torch.testing.assert_close(out.double(), 2 * want, rtol=1e-6, atol=1e-6)


def test_a_part_of_a_buffer_is_filled_and_no_more():
    buffer = torch.zeros(2, 12)
    add_product(buffer[0, 3:9].view(2, 3), torch.ones(2, 5), torch.ones(5, 3))
    assert buffer.sum() == 30 and buffer[0, 3:9].sum() == 30


def test_a_cpu_has_no_kernel_for_it_and_others_are_tried_once(monkeypatch):
    assert not adds_in_fp32(torch.device("cpu")) and not adds_in_fp32(torch.device("meta"))
    tried = []
    monkeypatch.setattr(weight_products, "_ABLE", {})
    monkeypatch.setattr(weight_products, "_works", lambda device: not tried.append(device))
    device = torch.device("cuda", 0)
    assert adds_in_fp32(device) and adds_in_fp32(device) and tried == [device]


def test_a_device_that_cannot_is_found_out():
    assert not weight_products._works(torch.device("cpu"))  # torch has no such kernel there


def test_where_it_can_one_kernel_adds_narrow_factors(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    calls = []
    monkeypatch.setattr(weight_products, "adds_in_fp32", lambda device: True)
    like = {"dtype": torch.bfloat16, "device": "meta"}
    out, a, b = (
        torch.empty(2, 3, device="meta"),
        torch.empty(2, 5, **like),
        torch.empty(5, 3, **like),
    )
    with Calls():
        add_product(out, a, b)
    assert calls == ["aten.addmm.dtype_out"]


def test_a_taker_is_found_until_it_is_removed():
    first, second = parameter(), parameter()
    taker = [].extend
    set_taker(first, taker)
    assert taker_of(first) is taker and taker_of(second) is None
    set_taker(first, None)
    set_taker(first, None)
    assert taker_of(first) is None


def test_hooks_of_others_want_a_gradient():
    weight = parameter()
    set_taker(weight, [].extend)
    weight.register_post_accumulate_grad_hook(lambda p: None)
    assert taker_of(weight) is not None  # that of the accumulator
    another = weight.register_post_accumulate_grad_hook(lambda p: None)
    assert taker_of(weight) is None
    another.remove()
    weight.register_hook(lambda grad: grad)
    assert taker_of(weight) is None


def test_a_queue_gives_all_factors_of_a_backward_at_once():
    taken, untaken, mixed = parameter(), parameter(), parameter()
    given = []
    set_taker(taken, lambda factors: given.append(list(factors)))
    set_taker(mixed, lambda factors: given.append("mixed"))
    dy, x = torch.ones(4, 2), torch.ones(4, 3)
    queue = WeightQueue()
    for factor in (1, 2):
        for each in (taken, untaken, mixed):
            factors = None if each is mixed and factor == 2 else (factor * dy, x)
            queue.push(each, lambda factor=factor: factor * dy.t() @ x, factors)
    deferred = queue.take()
    deferred.run()
    assert [[float(dy.sum()) for dy, _ in each] for each in given] == [[8.0, 16.0]]
    assert taken.grad is None
    assert untaken.grad.sum() == mixed.grad.sum() == 12 * 6
    deferred.run()
    assert len(given) == 1
