"""Kernels of a block besides its products, and the bytes that they read and write, on device meta.

The block's own forward and backward run on tensors without memory, and every operation that torch
dispatches is counted. Products and attention are counted by their operations (``block_flops``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron_dist.diagnosis import shape_axes
from kenotron_models.block import BlockSpec
from kenotron_models.meta_block import MetaMicroBatch, OneKernel, block_on_meta, run_backward
from kenotron_models.transformers_block import TransformersBlock

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "mv", "dot"}
"""Operations whose time is that of arithmetic: their bytes are not counted."""
WITHOUT_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach",
    "lift_fresh",
}  # fmt: skip
"""Operations that neither read nor write."""


@dataclass(frozen=True)
class KernelWork:
    """Kernels of one direction of a block."""

    kernels: int
    """How many, those of products included."""
    nbytes: int
    """Bytes that all but products read and write."""
    calls: Mapping[str, int]
    """Collectives, by axis."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes that leave the rank, by axis: in both directions those of ``sent_bytes``."""

    def times(self, share: float) -> KernelWork:
        """Return those of another number of tokens: as many kernels, other bytes."""
        return replace(self, nbytes=int(self.nbytes * share))


@lru_cache(maxsize=256)
def block_kernels(
    block: BlockSpec | TransformersBlock, width: int, batch: MetaMicroBatch
) -> tuple[KernelWork, KernelWork]:
    """Return the kernels of the forward and of the backward of a block on the first rank.

    Attention is one kernel of which no byte is counted. The arguments are those of ``kept_bytes``;
    experts are expected to have an even load.
    """
    axes, recorder = shape_axes({"tp": batch.tp, "ep": batch.ep})
    layer, x, context = block_on_meta(block, width, batch, axes)
    with recorder, OneKernel(batch.fused_norms):
        with Kernels() as forward:
            y = layer(x, context)
        before = recorder.cut()
        with Kernels() as backward:
            run_backward(y)
    found = (forward, before), (backward, recorder.entries)
    first, second = (
        KernelWork(
            counted.kernels,
            counted.nbytes,
            Counter(entry.ticket.axis for entry in entries),
            {name: sent for name, sent in recorder.bytes_per_axis(entries).items() if sent},
        )
        for counted, entries in found
    )
    return first, second


class Kernels(TorchDispatchMode):
    """Counts kernels, and the bytes of what all but products and attention read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if not func.is_view and name not in WITHOUT_KERNEL:
            self.kernels += 1
            if name not in PRODUCTS and "attention" not in name:
                self.nbytes += _nbytes((args, kwargs, out))
        return out


def _nbytes(values: Any) -> int:
    """Return the bytes of tensors of any shape; elements that are one in memory count once."""
    found = 0
    for each in tree_leaves(values):
        if isinstance(each, Tensor):
            sizes = zip(each.shape, each.stride(), strict=True)
            found += each.element_size() * math.prod(size for size, stride in sizes if stride)
    return found
