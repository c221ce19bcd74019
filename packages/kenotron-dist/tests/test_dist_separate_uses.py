"""Gradients of separate uses of a parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kenotron_dist.separate_uses import separate_use, separate_uses, set_use_receiver


def test_each_use_is_handed_over_by_itself() -> None:
    parameter, found = nn.Parameter(torch.ones(2)), list[tuple[int, Tensor]]()
    set_use_receiver(parameter, lambda number, grad: found.append((number, grad)))
    uses = separate_uses(parameter, 3)
    sum(i * use for i, use in enumerate(uses, 1)).sum().backward()
    assert sorted((number, grad.tolist()) for number, grad in found) == [
        (0, [1.0, 1.0]), (1, [2.0, 2.0]), (2, [3.0, 3.0]),
    ]  # fmt: skip
    assert parameter.grad is None


def test_a_receiver_may_change_what_it_gets() -> None:
    parameter, x = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    set_use_receiver(parameter, lambda _, grad: grad.zero_())
    y = x * 1  # its gradient is the same tensor as that of the use
    (separate_use(parameter, 0) + y).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0]


def test_without_a_receiver_autograd_adds() -> None:
    parameter = nn.Parameter(torch.ones(2))
    set_use_receiver(parameter, lambda *_: None)
    set_use_receiver(parameter, None)
    sum(separate_uses(parameter, 2)).sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0, 2.0]


def test_one_use_is_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert separate_uses(parameter, 1) == (parameter,)
