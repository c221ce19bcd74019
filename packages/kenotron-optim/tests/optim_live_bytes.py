"""Bytes of the tensors that are alive, counted at every operation of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages from their first use within the mode until they are freed.

    Temporaries that a kernel allocates inside one operation are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[weakref.ref, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(out)
        return out

    def count(self, found: Any) -> None:
        """Count the tensors of a nested structure."""
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                ref = weakref.ref(storage, self._freed)
                if storage.nbytes() and ref not in self._storages:
                    self._storages[ref] = storage.nbytes()
                    self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _freed(self, ref: weakref.ref) -> None:
        self.now -= self._storages.pop(ref)
