"""Bytes that are held at a time, and a kernel that makes its results and computes nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron_cp import PLAIN, Kernel, PartialAttention, Tile


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, while their memory lives.

    What a kernel allocates and frees inside is not seen. torch's profiler, which sees it, keeps
    gigabytes of events of a long sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.see((args, kwargs), False)  # what was not made here is an input
        found = func(*args, **kwargs)
        self.see(found, True)
        return found

    def see(self, tensors: Any, made: bool) -> None:
        """Count the memory of tensors that is not known yet, until it is freed."""
        for x in tree_leaves(tensors):
            if not isinstance(x, Tensor) or x.untyped_storage()._cdata in self.known:
                continue
            storage = x.untyped_storage()
            self.known.add(storage._cdata)
            nbytes = storage.nbytes() if made else 0
            self.now += nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, storage._cdata, nbytes)

    def forget(self, name: int, nbytes: int) -> None:
        """Called when memory is freed."""
        self.known.discard(name)
        self.now -= nbytes


def _forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> PartialAttention:
    return PartialAttention(q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3]))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


HOLLOW = Kernel("hollow", _forward, _backward, PLAIN.dtype)
"""Holds what torch's kernels for CPUs hold, but for what they free before they return."""
