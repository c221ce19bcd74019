"""Activations between layers: a tensor, a tuple of tensors, or a dict of them by name."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Activation = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""One output of a layer and input of the next; some of its tensors may want no gradient."""

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float32, torch.bfloat16, torch.float16, torch.float64,
        torch.int64, torch.int32, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Form(NamedTuple):
    """Everything about an activation but its values."""

    names: tuple[str, ...] | int | None
    """Keys of a dict, length of a tuple, None for a tensor."""
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]
    """dtype, shape and whether a gradient comes back, of every tensor."""

    def encode(self) -> bytes:
        """As JSON text."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, text: bytes) -> Form:
        """Undo ``encode``."""
        names, tensors = json.loads(text)
        names = tuple(names) if isinstance(names, list) else names
        return cls(names, tuple((dtype, tuple(shape), wants) for dtype, shape, wants in tensors))

    def empty(self, device: torch.device, *, gradients: bool) -> list[Tensor]:
        """Room for its tensors, of their shapes, or for their gradients where they want one."""
        return [
            torch.empty(shape, dtype=_DTYPES[dtype], device=device)
            for dtype, shape, wants in self.tensors
            if wants or not gradients
        ]

    def wanting(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``tensors``, which have the shapes of this form, that want a gradient."""
        return [x for x, (_, _, wants) in zip(tensors, self.tensors, strict=True) if wants]


def flatten(x: Any) -> tuple[tuple[str, ...] | int | None, list[Tensor]]:
    """The tensors, of any shape, of an activation, and how they were held.

    Raises TypeError for anything but a tensor, a tuple of tensors or a dict of them.
    """
    names: tuple[str, ...] | int | None = None
    tensors = [x]
    if isinstance(x, dict):
        names, tensors = tuple(x), list(x.values())
    elif type(x) is tuple:  # a named one would arrive without its names
        names, tensors = len(x), list(x)
    others = [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]
    if others or (isinstance(names, tuple) and not all(isinstance(name, str) for name in names)):
        what = f"with {', '.join(others)} in it" if tensors != [x] and others else "as activation"
        raise TypeError(
            f"a {type(x).__name__} {what}: layers pass on a tensor, a tuple of tensors, or a dict "
            "of tensors by name"
        )
    return names, tensors


def unflatten(names: tuple[str, ...] | int | None, tensors: Sequence[Tensor]) -> Activation:
    """Undo ``flatten``; tensors are of any shape."""
    if names is None:
        return tensors[0]
    if isinstance(names, int):
        return tuple(tensors)
    return dict(zip(names, tensors, strict=True))


def form_of(names: tuple[str, ...] | int | None, tensors: Sequence[Tensor]) -> Form:
    """The form of a flattened activation, of tensors of any shape.

    Raises ValueError for a dtype that cannot travel.
    """
    found = []
    for x in tensors:
        dtype = str(x.dtype)
        if dtype not in _DTYPES:
            raise ValueError(
                f"a stage returned {dtype} with {x.ndim} dims: between stages a tensor has one of "
                f"{', '.join(_DTYPES)}"
            )
        found.append((dtype, tuple(x.shape), x.requires_grad))
    return Form(names, tuple(found))


def key_of(x: Any) -> Hashable:
    """Return what fixes the form of every activation of a micro-batch: the form of its input."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape
    names, tensors = flatten(x)
    return names, tuple((each.dtype, each.shape) for each in tensors)
