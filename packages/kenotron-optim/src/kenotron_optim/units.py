"""Units of ZeRO-3: modules whose parameters come and go, and the hooks that say when."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(eq=False)
class Unit:
    """A module, and what it needs."""

    place: int
    """In the order of the forward."""
    groups: list[int]
    """Groups of parameters that it reads."""
    paths: frozenset[str]
    """Its own parameters that learn."""
    held: frozenset[str]
    """Its own parameters that come and go, frozen ones too."""
    differentiates: bool = True
    """True where its last forward with gradients has a backward."""
    left: set[str] = field(default_factory=set)
    """Those without a gradient in the backward that runs."""
    waiting: int = 0
    """Backwards for which it was gathered and is not freed."""
    learned: set[str] = field(default_factory=set)
    """Parameters whose gradient has come in this backward; in a split one some come later."""
    by_input: bool = False
    """True where its backward is over with the gradient of its input: what is left then, products
    of weights' gradients that a split backward makes later, reads no weight that is not small."""


class UnitHook:
    """A hook of a module for one unit, which does not keep the parameters' owner alive.

    A deep copy of the module, which has other parameters, has a hook that does nothing.
    """

    def __init__(self, function: Callable[..., Any], unit: Unit) -> None:
        self._function, self._unit = weakref.WeakMethod(function), unit

    def __call__(self, *args: Any) -> Any:
        """Call the function with the unit and what the hook gets."""
        function = self._function()
        return None if function is None else function(self._unit, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing


def no_leaf(x: Tensor) -> Tensor:
    """Return a view of a leaf (of any shape) that learns, and any other tensor as it is.

    Autograd gives a leaf its gradient before all else that is ready, and any other tensor after all
    that was computed later: only then a unit is done when its input has a gradient.
    """
    return x.view_as(x) if x.is_leaf and x.requires_grad else x


def is_opaque(leaf: Any) -> bool:
    """Return whether a part of an output is an object that may hold tensors out of sight."""
    return leaf is not None and not isinstance(leaf, Tensor | bool | int | float | complex | str)


def is_small(parameter: Tensor) -> bool:
    """Return whether a parameter is a vector or a short filter, which a split backward keeps.

    Vectors are (n,), filters (channels, 1, width).

    A product of a weight's gradient may compute its input again, by a norm or a convolution.
    """
    return parameter.ndim < 2 or (parameter.ndim == 3 and parameter.shape[1] == 1)


def has_memory(parameter: Tensor) -> bool:
    """Return whether the values of a parameter, of any shape, may be read."""
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


def _nothing(*_: Any) -> None:
    return None


class Once:
    """A function that does something with the first of its calls alone."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        """Do it, or nothing."""
        function, self._function = self._function, None
        if function is not None:
            function()


class GradientCalls:
    """Functions that are called once each, when the gradient of a tensor is there."""

    def __init__(self) -> None:
        self._calls = WeakTensorKeyDictionary()

    def call(self, x: Tensor, function: Callable[[], None], *, first: bool = False) -> None:
        """Call a function then; ``first``: before those that were given earlier.

        ``x`` is of any shape.

        So the unit that read a tensor is freed before the one that made it gathers the next.
        """
        if x not in self._calls:
            calls = self._calls[x] = deque[Callable[[], None]]()
            x.register_hook(partial(_all, calls))
        (self._calls[x].appendleft if first else self._calls[x].append)(function)


def _all(calls: deque[Callable[[], None]], _: Tensor) -> None:
    while calls:
        calls.popleft()()
