"""Products of weight gradients are kept, added in order and delivered once, through the hooks."""

import torch
from torch import nn

from kenotron_dist.defer import WeightQueue, deferring


class Deferring(nn.Linear):
    defers_weight_grad = True


def test_products_are_added_in_order_and_delivered_once():
    queue, calls, fired = WeightQueue(), [], []
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    for parameter in (first, second):
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))

    def product(name, like, value):
        def compute():
            calls.append(name)
            return torch.full_like(like, value)

        return compute

    queue.push(first, product("a", first, 1.0))
    queue.push(second, product("b", second, 5.0))
    queue.push(first, product("c", first, 2.0))
    deferred = queue.take()
    assert len(deferred) == 3 and not calls and first.grad is None
    assert len(queue.take()) == 0
    deferred.run()
    assert calls == ["a", "c", "b"]
    assert [each.tolist() for each in fired] == [[3.0, 3.0], [5.0, 5.0, 5.0]]
    deferred.run()
    assert len(fired) == 2 and first.grad.tolist() == [3.0, 3.0]


def test_layers_that_declare_it_are_found():
    module = nn.Sequential(nn.Linear(1, 1), Deferring(1, 1), nn.Sequential(Deferring(1, 1)))
    assert len(list(deferring(module))) == 2
    assert list(deferring(module[1])) == [module[1]]
