"""Host tensors in one allocation, page-locked where an accelerator copies them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_dist import page_locked

_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, as those of torch do."""


def host_tensors(like: Sequence[Tensor], *, pin: bool) -> list[Tensor]:
    """Return zeros in host memory, of the shapes and dtypes of ``like``.

    Page-locked ones are in one allocation, which lives as long as one of them.

    Args:
        like: tensors whose storage may be empty.
        pin: whether the memory is page-locked.

    Raises:
        RuntimeError: the driver does not lock so much.
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like]
    if not pin or not sum(sizes):
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in like]
    advice = "set optimizer.offload to false, or raise the limit of memory of this process"
    memory = page_locked(sum(sizes), advice)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=False)
    ]
