"""Hooks by which autograd and layers hand gradients to an accumulator, without keeping it alive.

A parameter owns its hook, and an accumulator owns buffers and parameters: a hook that owned the
accumulator would keep all of them in memory. Hooks refer to it weakly, and end with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from kenotron_dist.separate_uses import set_use_receiver
from kenotron_dist.weight_products import Factors, set_taker

_HOOKS = WeakTensorKeyDictionary()
"""The hook of every parameter that is accumulated."""
_TAKEN_BY = WeakTensorKeyDictionary()
"""Receiver of the products of a parameter's gradient: a weak reference to an accumulator."""


class Receiver(Protocol):
    """Receiver of gradients: an accumulator."""

    def receive_gradient(self, path: str, gradient: Tensor) -> None:
        """Add a gradient of a parameter, of its shape."""
        ...

    def receive_products(self, path: str, products: Sequence[Factors]) -> None:
        """Add the products of a parameter's gradient in one backward pass."""
        ...


class UseReceiver(Protocol):
    """Receiver of the gradients of separate uses: an accumulator of leaves."""

    def receive_use(self, path: str, number: int, gradient: Tensor) -> None:
        """Add the gradient, of its shape, of one use of a parameter in a backward pass."""
        ...


class GradientHooks:
    """The hooks of one accumulator on its parameters; those of earlier ones are removed.

    Args:
        receiver: gets the gradients, which parameters then no longer have. Referred to weakly.
        parameters: by the paths that the receiver gets.
    """

    def __init__(self, receiver: Receiver, parameters: Mapping[str, nn.Parameter]) -> None:
        self._receiver = weakref.ref(receiver)
        handles = []
        for path, parameter in parameters.items():
            if parameter in _HOOKS:
                _HOOKS[parameter].remove()
            set_taker(parameter, None)
            set_use_receiver(parameter, None)
            hook = partial(_hand_over, self._receiver, path)
            _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(hook)
            handles.append(_HOOKS[parameter])
        ending = weakref.finalize(receiver, _remove, handles, self._receiver)
        ending.atexit = False  # pyrefly: ignore[missing-attribute]

    def take(self, path: str, parameter: nn.Parameter) -> None:
        """Let layers give products of a parameter's gradient to the receiver."""
        _TAKEN_BY[parameter] = self._receiver
        set_taker(parameter, _taker(self._receiver, path))


def receive_uses(receiver: UseReceiver, parameters: Mapping[str, nn.Parameter]) -> None:
    """Hand the gradients of separate uses of parameters, by their paths, to a receiver.

    It is referred to weakly. ``GradientHooks`` of a later accumulator end it.
    """
    weak = weakref.ref(receiver)
    for path, parameter in parameters.items():
        set_use_receiver(parameter, partial(_hand_over_use, weak, path))


def _hand_over_use(
    receiver: weakref.ref[UseReceiver], path: str, number: int, gradient: Tensor
) -> None:
    owner = receiver()
    if owner is not None:  # else the sum is not read
        owner.receive_use(path, number, gradient)


def _hand_over(receiver: weakref.ref[Receiver], path: str, parameter: Tensor) -> None:
    """Move a gradient from its parameter to the receiver, if that still exists."""
    owner = receiver()
    if owner is None or parameter.grad is None:
        return
    gradient, parameter.grad = parameter.grad, None
    owner.receive_gradient(path, gradient)


def _taker(receiver: weakref.ref[Receiver], path: str) -> Callable[[Sequence[Factors]], None]:
    def take(products: Sequence[Factors]) -> None:
        owner = receiver()
        if owner is not None:  # else the sum is not read
            owner.receive_products(path, products)

    return take


def _remove(handles: Iterable[RemovableHandle], receiver: weakref.ref[Receiver]) -> None:
    """Remove the hooks of an accumulator that is freed from parameters that are not."""
    for handle in handles:
        handle.remove()
    for parameter, by in list(_TAKEN_BY.items()):
        if by is receiver:
            set_taker(parameter, None)
            del _TAKEN_BY[parameter]
