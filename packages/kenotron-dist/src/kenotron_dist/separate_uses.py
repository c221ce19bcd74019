"""Uses of a parameter whose gradients are handed to their accumulator one by one.

autograd adds the gradients of all uses of a parameter in a backward pass. A separate use keeps its
own: in the reproducible mode it is a leaf of a tree of sums that is the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["separate_use", "separate_uses", "set_use_receiver"]

UseReceiver = Callable[[int, Tensor], None]
"""Takes the number of a use and its gradient, which it may keep and change."""

_RECEIVERS = WeakTensorKeyDictionary()


def set_use_receiver(parameter: nn.Parameter, receiver: UseReceiver | None) -> None:
    """Hand the gradients of separate uses to ``receiver``; None: autograd adds them.

    The parameter keeps ``receiver`` alive: refer weakly to what has the parameter.
    """
    if receiver is None:
        _RECEIVERS.pop(parameter, None)
    else:
        _RECEIVERS[parameter] = receiver


def separate_use(parameter: Tensor, number: int) -> Tensor:
    """Return the value of a parameter, of any shape, for its use ``number`` in a backward pass.

    With a receiver the parameter itself gets no gradient from it.
    """
    return _Use.apply(parameter, number)


def separate_uses(
    parameter: Tensor, count: int, *, part: int = 0, parts: int = 1
) -> tuple[Tensor, ...]:
    """Return ``count`` separate uses of a parameter of any shape; one alone is the parameter.

    With ``parts`` a backward pass has so many calls, of which this is number ``part``: use i is
    number ``i * parts + part``.
    """
    if count * parts == 1:
        return (parameter,)
    return tuple(separate_use(parameter, number * parts + part) for number in range(count))


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, number: int) -> Tensor:
        ctx.set_materialize_grads(False)  # a product that is put off gives none here
        ctx.parameter, ctx.number = parameter, number
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        receiver = _RECEIVERS.get(ctx.parameter)
        if receiver is None or grads[0] is None:
            return grads[0], None
        receiver(ctx.number, grads[0].clone())  # others may read what autograd gives
        return None, None
