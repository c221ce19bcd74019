"""Bytes that a block keeps of a micro-batch for its backward, measured on device meta.

The block's own forward runs on tensors without memory, and what is alive afterwards is counted. So
nothing lists a second time what a kind of mixer or feed-forward keeps.

Shapes: B rows, S tokens of a row, T = B * S, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron_dist import Axis
from kenotron_models.block import Block, BlockSpec
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.part import Part
from kenotron_models.recompute import Recompute
from kenotron_tp import TPMode


@lru_cache(maxsize=256)
def kept_bytes(
    block: BlockSpec,
    width: int,
    rows: int,
    sequence: int,
    *,
    tp: int = 1,
    mode: TPMode = TPMode(),
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    fused_norms: bool = False,
) -> int:
    """Return the bytes that one tp rank keeps of a micro-batch for the backward of a block.

    Its input is counted where the backward reads it, its output is the next layer's. What all
    layers share (angles, masks) and buffers of communication are not counted.

    Args:
        block: what it is made of.
        width: D.
        rows: B.
        sequence: S, of one rank where rows are cut over cp.
        tp: number of ranks over which features are cut.
        mode: how they communicate.
        dtype: of parameters and activations.
        recompute: what is computed again.
        fused_norms: whether RMSNorm is one kernel, as on CUDA, which keeps its input alone. A CPU
            keeps fp32 copies.
    """
    axis = Axis("tp", 0, tuple(range(tp)), backend="nccl")  # without a group: shapes alone
    build = Build(axis, mode, dtype=dtype, shapes_only=True)
    layer = Block(_computed_by_torch(block), width, build, recompute=recompute)
    places = torch.arange(sequence, device="meta").expand(rows, sequence)
    numbers = torch.arange(rows, device="meta")
    context = Context(places, numbers, dropout_key=0)
    tokens = rows * sequence
    held = -(-tokens // tp) if mode.sequence_parallel else tokens
    x = torch.empty(held, width, dtype=dtype, device="meta", requires_grad=True)
    with _OneKernel(fused_norms):
        return bytes_alive(layer, x, context)


def bytes_alive(block: Block, x: Tensor, context: Context) -> int:
    """Return the bytes that are alive after a forward and were not before, without its output.

    Args:
        block: on any device.
        x: (T, D), or (T/t, D) under sequence parallelism; requires a gradient.
        context: the micro-batch. What layers share of it is made first, and not counted.
    """
    for part in block.children():
        if isinstance(part, Part):
            part.prepare(context)
    with _Storages() as made:
        y = block(x.clone(), context)  # a clone, which lives on only where the backward reads it
    gc.collect()
    return made.alive(without=y)


class _Storages(TorchDispatchMode):
    """Notes every storage that is made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:  # neither a view nor changed in place
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, without: Tensor) -> int:
        """Bytes of all that is still there, but for the storage of a tensor (any shape)."""
        other = without.untyped_storage()._cdata
        return sum(
            nbytes
            for address, (storage, nbytes) in self._made.items()
            if address != other and not storage.expired()
        )


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, Tensor)]


class _Attention(torch.autograd.Function):
    """Stands for a fused kernel: it keeps its inputs, its output and a number a query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out


class _Norm(torch.autograd.Function):
    """Stands for a fused RMSNorm: it keeps its input and a number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class _OneKernel(TorchFunctionMode):
    """Lets one kernel compute attention, and with ``norms`` RMSNorm: device meta has none."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        self._norms = norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])
        if func is F.rms_norm and self._norms:
            return _Norm.apply(args[0], args[2] if len(args) > 2 else kwargs.get("weight"))
        return func(*args, **kwargs)


def _computed_by_torch(block: BlockSpec) -> BlockSpec:
    """The same block; attention kernels that device meta has not keep what torch's own keeps."""
    mixer: Any = block.mixer
    if getattr(mixer, "backend", "plain") == "plain":
        return block
    return replace(block, mixer=replace(mixer, backend="sdpa"))
