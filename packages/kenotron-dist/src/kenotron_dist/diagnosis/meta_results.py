"""Results of operators on meta tensors, computed once for each combination of operator and shapes.

torch computes most of these results in Python, 0.1 ms each. A model calls the same few hundred
combinations for every layer and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NOTHING: Mapping[str, Any] = {}


class MetaResults(TorchDispatchMode):
    """Within it, repeated operators on meta tensors return new tensors of the known form.

    Only operators that return one new tensor and change none are remembered; all others run as
    without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._is_pure: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps each call once more: nothing is compiled within it

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of one operator."""
        given = kwargs or _NOTHING
        pure = self._is_pure.get(func)
        if pure is None:
            pure = self._is_pure[func] = _is_pure(func)
        if not pure:
            return func(*args, **given)
        key = func, tuple(map(_form, args)), *((name, _form(x)) for name, x in given.items())
        form = self._known.get(key)
        if form is None:
            result = func(*args, **given)
            if result.is_meta:
                self._known[key] = result.shape, result.stride(), result.dtype
            return result
        shape, stride, dtype = form
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _is_pure(func: Any) -> bool:
    """Return True for an operator that returns one new tensor and changes none."""
    schema = func._schema
    values = (*schema.arguments, *schema.returns)
    alone = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
    return alone and all(value.alias_info is None for value in values)


def _form(x: Any) -> Any:
    """Everything about an argument that the form of a result can depend on."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    if isinstance(x, (list, tuple)):
        return tuple(map(_form, x))
    return type(x), x
