"""Most bytes that a block has in use in its forward and backward, measured on device meta.

Shapes: B rows, S tokens of a row, T = B * S, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron_dist import Axis
from kenotron_models.block import BlockSpec
from kenotron_models.block_memory import storages_of
from kenotron_models.meta_block import MetaMicroBatch, OneKernel, block_on_meta, run_backward
from kenotron_models.part import Part
from kenotron_models.transformers_block import TransformersBlock


@lru_cache(maxsize=256)
def working_bytes(
    block: BlockSpec | TransformersBlock,
    width: int,
    batch: MetaMicroBatch,
    *,
    tp: int = 1,
    fused_norms: bool = False,
) -> tuple[int, int]:
    """Return the most bytes that one tp rank has in use for a block, and those that blocks share.

    The first are those of forward and backward, what is kept and the gradients of input, output and
    one weight included. The second are angles and masks of a micro-batch. The arguments are those
    of ``kept_bytes``.
    """
    axis = Axis("tp", 0, tuple(range(tp)), backend="nccl")  # without a group: shapes alone
    layer, x, context = block_on_meta(block, width, batch, {"tp": axis})
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_free)
    with OneKernel(fused_norms), InUse() as live:
        for part in layer.children():
            if isinstance(part, Part):
                part.prepare(context)
        shared = live.now
        run_backward(_Output.apply(layer(x.clone(), context)))
    return live.peak - shared, shared


def _free(parameter: Tensor) -> None:
    """Free a gradient, which is added to a buffer in training."""
    parameter.grad = None


class _Output(torch.autograd.Function):
    """Stands for the next layer: it keeps nothing of its input and returns its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return grads[0].new_empty(shape, dtype=dtype)


class InUse(TorchDispatchMode):
    """Counts the bytes of storages from the operation that makes them until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[weakref.ref, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        for storage in storages_of(out):
            ref = weakref.ref(storage, self._freed)
            if storage._cdata not in given and ref not in self._sizes:
                self._sizes[ref] = storage.nbytes()
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, ref: weakref.ref) -> None:
        self.now -= self._sizes.pop(ref)
