"""Activations that are computed again in the backward instead of being kept.

``full`` keeps a layer's input, ``mixer`` and ``feed_forward`` that of one part; ``selective`` keeps
the results of matrix products and of attention and computes again what is cheap between them
(Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "full", "selective", "mixer", "feed_forward"]
"""Part of a layer that is computed again; the last two: that part of it, and nothing else."""


Result = TypeVar("Result")


class _View(NamedTuple):
    """A kept tensor that is a view of what can be computed again."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def whole(function: Callable[..., Result], *inputs: object) -> Result:
    """``function(*inputs)``, of which only the inputs are kept."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def between(
    function: Callable[[Tensor], Tensor], x: Tensor, product: Callable[[Tensor], Tensor]
) -> Tensor:
    """``product(function(x))`` without keeping ``function(x)`` or anything inside it.

    ``function`` must be cheap, pure and without communication: the backward computes it twice, for
    the product's weight and for its own gradient. ``x``, of any shape, must not change in between.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiler does the same
        return product(function(x))
    y = whole(function, x)
    # Not its address, which all tensors on meta share; and no reference to y in ``pack``, which
    # autograd keeps as long as what was packed.
    storage, dtype = y.untyped_storage()._cdata, y.dtype

    def pack(kept: Tensor) -> Tensor | _View:
        if kept.dtype != dtype or kept.untyped_storage()._cdata != storage:
            return kept
        return _View(kept.size(), kept.stride(), int(kept.storage_offset()))

    def unpack(kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            again = function(x)
        return again.as_strided(kept.size, kept.stride, kept.offset)

    with saved_tensors_hooks(pack, unpack):
        return product(y)
