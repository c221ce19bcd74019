"""Most bytes that a block has in use in its forward and backward, measured on device meta.

Shapes: B rows, S tokens of a row, T = B * S, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron_dist.diagnosis import Entry, shape_axes
from kenotron_models.block import BlockSpec
from kenotron_models.block_memory import storages_of
from kenotron_models.meta_block import MetaMicroBatch, OneKernel, block_on_meta, run_backward
from kenotron_models.part import Part
from kenotron_models.transformers_block import TransformersBlock


class Working(NamedTuple):
    """Bytes that are in use in the forward and backward of a block."""

    most: int
    """At most, without what blocks share: what is kept, and the gradients of input, output and one
    weight are included."""
    shared: int
    """Of what the blocks of a micro-batch share until its backward is over: angles and masks."""
    exchanged: int
    """Those of ``most`` that are sent to, and come from, other ranks' experts, and are not kept."""


@lru_cache(maxsize=256)
def working_bytes(
    block: BlockSpec | TransformersBlock, width: int, batch: MetaMicroBatch
) -> Working:
    """Return the most bytes that one rank has in use for a block.

    The arguments are those of ``kept_bytes``.
    """
    axes, _ = shape_axes({"tp": batch.tp, "ep": batch.ep, "cp": batch.cp})
    layer, x, context = block_on_meta(block, width, batch, axes)
    given = {storage._cdata: storage.nbytes() for storage in storages_of(context.made)}
    given.pop(context.positions_BS.untyped_storage()._cdata, None)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_free)
    with OneKernel(batch.fused_norms), InUse() as live:
        if (pulse := axes["ep"].pulse) is not None:
            pulse.listeners = (live.heard,)
        for part in layer.children():
            if isinstance(part, Part):
                part.prepare(context)
        shared = live.now
        end = _Output.apply(layer(x.clone(), context))
        live.kept = {*live.over_ep}
        run_backward(end)
    return Working(live.peak - shared, shared + sum(given.values()), live.exchanged)


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
        self.now = self.peak = self.exchanged = 0
        self._sizes: dict[weakref.ref, int] = {}
        self.over_ep: set[weakref.ref] = set()
        self.kept: set[weakref.ref] = set()
        """What the forward has left of ``over_ep``: activations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        for storage in storages_of(out):
            ref = weakref.ref(storage, self._freed)
            if storage._cdata not in given and ref not in self._sizes:
                self._sizes[ref] = storage.nbytes()
                self.now += storage.nbytes()
        if self.now > self.peak:
            self.peak = self.now
            self.exchanged = sum(self._sizes[ref] for ref in self.over_ep - self.kept)
        return out

    def heard(self, entry: Entry) -> None:
        """Note the two ends of an exchange: the newest storages, what arrives and what is sent.

        Both are made just before it starts; what is sent is the newest of its size.
        """
        if entry.ticket.axis != "ep" or not self._sizes:
            return
        arrives, *before = reversed(self._sizes)
        given = prod(entry.shape) * getattr(torch, entry.dtype).itemsize
        sent = (ref for ref in before if self._sizes[ref] == given)
        self.over_ep |= {arrives, next(sent, arrives)}

    def _freed(self, ref: weakref.ref) -> None:
        self.now -= self._sizes.pop(ref)
        self.over_ep.discard(ref)
