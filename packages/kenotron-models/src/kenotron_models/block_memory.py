"""Bytes that a block keeps of a micro-batch for its backward, measured on device meta.

The block's own forward runs on tensors without memory, and what is alive afterwards is counted. So
nothing lists a second time what a kind of mixer or feed-forward keeps.

Shapes: B rows, S tokens of a row, T = B * S, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

import gc
import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron_dist.diagnosis import shape_axes
from kenotron_models.block import BlockSpec
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.meta_block import (
    MetaMicroBatch,
    OneKernel,
    block_on_meta,
    communicating_alike,
)
from kenotron_models.part import Part
from kenotron_models.transformers_block import TransformersBlock
from kenotron_models.transformers_layers import TransformersLayer, transformers_layers
from kenotron_models.transformers_spec import TransformersSpec


def kept_bytes(block: BlockSpec | TransformersBlock, width: int, batch: MetaMicroBatch) -> int:
    """Return the bytes that one rank keeps of a micro-batch for the backward of a block.

    Its input is counted where the backward reads it, its output is the next layer's. What all
    layers share (angles, masks) is not counted. Experts have an even load.

    Args:
        block: what it is made of.
        width: D.
        batch: the micro-batch of one rank.
    """
    return sum(kept_sizes(block, width, batch))


@lru_cache(maxsize=256)
def kept_sizes(
    block: BlockSpec | TransformersBlock, width: int, batch: MetaMicroBatch
) -> tuple[int, ...]:
    """Return the bytes of each storage that ``kept_bytes`` adds up."""
    axes, _ = shape_axes({"tp": batch.tp, "ep": batch.ep, "cp": batch.cp})
    layer, x, context = block_on_meta(block, width, batch, axes)
    with OneKernel(batch.fused_norms):
        return sizes_alive(layer, x, context)


def bytes_alive(block: nn.Module, x: Tensor, context: Context, *, wait: float = 0.0) -> int:
    """Return the sum of ``sizes_alive``; x is (T, D)."""
    return sum(sizes_alive(block, x, context, wait=wait))


def sizes_alive(
    block: nn.Module, x: Tensor, context: Context, *, wait: float = 0.0
) -> tuple[int, ...]:
    """Return the bytes of storages that a forward leaves behind, without its output's.

    Args:
        block: on any device.
        x: (T, D), or (T/t, D) under sequence parallelism; requires a gradient.
        context: the micro-batch. What layers share of it is made first, and not counted.
        wait: seconds in which threads of real collectives let go of their tensors.
    """
    for part in block.children():
        if isinstance(part, Part):
            part.prepare(context)
    gc.freeze()  # so that only what is made from here on is looked through
    try:
        with _Storages() as made:
            y = block(x.clone(), context)  # a clone, which lives on only where backward reads it
        time.sleep(wait)
        gc.collect()
        return made.alive(without=y)
    finally:
        gc.unfreeze()


def norm_bytes(norm: nn.Module, tokens: int, width: int, dtype: torch.dtype, *, fused: bool) -> int:
    """Return the bytes that a model's last norm keeps of its input (tokens, width) of ``dtype``.

    Args:
        norm: on meta.
        tokens: of this rank.
        width: D.
        dtype: of the residual stream.
        fused: whether RMSNorm is one kernel.
    """
    x = torch.empty(tokens, width, dtype=dtype, device="meta", requires_grad=True)
    with OneKernel(fused):
        return bytes_alive(norm, x, Context(torch.empty(1, tokens, device="meta")))


@lru_cache(maxsize=64)
def head_bytes(spec: TransformersSpec, batch: MetaMicroBatch) -> int:
    """Return the bytes that all after the last layer of a model keeps, without the logits.

    0 where it cannot be computed without values.
    """
    try:
        own = communicating_alike(spec)
    except ValueError:
        return 0
    axes, _ = shape_axes({"tp": batch.tp})
    build = Build(axes["tp"], batch.mode, dtype=batch.dtype)
    head = dict(transformers_layers(own, build, ("none",) * spec.depth)).get("head")
    if not isinstance(head, TransformersLayer):
        return 0  # a model in one piece
    head.fill_buffers(torch.device("meta"))
    places = torch.arange(batch.sequence, device="meta").expand(batch.rows, batch.sequence)
    held = -(-places.numel() // head.tokens_over.size)
    shape = held, spec.hidden_size
    x = torch.empty(shape, dtype=batch.dtype, device="meta", requires_grad=True)
    with OneKernel(batch.fused_norms):
        return bytes_alive(head, x, Context(places))


class _Storages(TorchDispatchMode):
    """Notes every storage that is made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        for storage in storages_of(out):
            if storage._cdata not in given:  # neither a view nor changed in place
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, without: Tensor) -> tuple[int, ...]:
        """Bytes of each that is still there, but for the storage of a tensor (any shape)."""
        other = without.untyped_storage()._cdata
        return tuple(
            nbytes
            for address, (storage, nbytes) in self._made.items()
            if address != other and not storage.expired()
        )


def storages_of(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors of a nested structure."""
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, Tensor)]
