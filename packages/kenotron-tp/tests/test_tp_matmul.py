"""Weights whose gradient somebody else adds up: the products of the gradient, and no gradient."""

import pytest
import torch
from test_tp_model import MODES, batch, begin
from torch.testing import assert_close

from kenotron_dist import Axis, WeightQueue, deferring
from kenotron_dist.testing import on_ranks
from kenotron_dist.weight_products import add_product, set_taker
from kenotron_tp import ColumnParallelLinear, RowParallelLinear


def taken(mesh, mode, put_off):
    """Gradients of a model, and those of its cut layers from the factors that takers are given."""
    model = begin(mesh["tp"], mode)
    tokens, labels = batch(0)
    model.loss(tokens, labels, fused=False).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    found, queue = {}, WeightQueue()
    names = {id(p): name for name, p in model.named_parameters()}
    for layer in deferring(model):
        name = names[id(layer.weight)]
        assert name not in found
        found[name] = torch.zeros_like(layer.weight)

        def take(products, out=found[name]):
            with torch.no_grad():
                for dy, x in products:
                    add_product(out, dy.t(), x)

        set_taker(layer.weight, take)
        layer.weight_queue = queue if put_off else None
    model.loss(tokens, labels, fused=False).backward()
    if put_off:
        assert not any(out.any() for out in found.values())
        queue.take().run()
    assert len(found) == 9
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in found)
        assert_close(found.get(name, parameter.grad), expected[name])


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("mode", list(MODES))
def test_a_taker_is_given_the_products_of_the_gradient(mode, put_off):
    for tp in (1, 2):
        on_ranks(taken, MODES[mode], put_off, tp=tp)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_compiled_layer_leaves_its_products_to_autograd(kind):
    layer = kind(6, 4, Axis.solo("tp"))
    given = []
    set_taker(layer.weight, given.extend)
    x = torch.randn(5, 6)
    torch.compile(layer, backend="eager", fullgraph=True)(x).sum().backward()
    assert not given and layer.weight.grad is not None
    layer.weight.grad = None
    layer(x).sum().backward()
    assert len(given) == 1 and layer.weight.grad is None


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_gradients_that_are_only_asked_for_are_given_to_no_taker(kind):
    layer, x = kind(6, 4, Axis.solo("tp")), torch.randn(5, 6, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), [layer.weight])[0]
    given = []
    set_taker(layer.weight, given.extend)
    torch.autograd.grad(layer(x).sum(), [x])
    layer(x).sum().backward(inputs=[x])
    assert not given and layer.weight.grad is None
    assert_close(torch.autograd.grad(layer(x).sum(), [layer.weight])[0], expected)
    assert not given
    layer(x).sum().backward(inputs=[layer.weight])
    assert len(given) == 1 and layer.weight.grad is None
