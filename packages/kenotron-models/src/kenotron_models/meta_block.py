"""A block on device meta: it runs on tensors without memory, so that what it does can be counted.

Shapes: B rows, S tokens of a row, T = B * S, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kenotron_cp import AttentionWay, Cut
from kenotron_dist import Axis
from kenotron_models.adapter import adapt
from kenotron_models.adapter_spec import AdapterSpec
from kenotron_models.block import Block, BlockSpec
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.decoder import LayerStack
from kenotron_models.recompute import Recompute
from kenotron_models.sequence_cut import SequenceCut
from kenotron_models.transformers_attention import ADVICE, OWN_ATTENTION
from kenotron_models.transformers_block import (
    TransformersBlock,
    input_on_meta,
    transformers_block_on_meta,
)
from kenotron_models.transformers_layers import LayerEntry
from kenotron_models.transformers_meta import layers_on_meta
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_tp import TPMode

TOKENS = 8
"""Tokens that a layer of transformers computes to show that it can."""
GROUPED = (torch._grouped_mm, F.grouped_mm)


@dataclass(frozen=True)
class MetaMicroBatch:
    """A micro-batch of one rank, and how a block computes it."""

    rows: int
    """B."""
    sequence: int
    """S, of one rank where rows are cut over cp."""
    _: KW_ONLY
    mode: TPMode = TPMode()
    """Communication mode of tp ranks."""
    dtype: torch.dtype = torch.float32
    """Of parameters and activations."""
    residual: torch.dtype | None = None
    """Of what a block reads and adds to; None: dtype."""
    recompute: Recompute = "none"
    """Part of the block that the backward computes again."""
    adapter: AdapterSpec | None = None
    """Of the block as layer 0; None: all of its weights learn."""
    tp: int = 1
    """Ranks over which features are cut."""
    ep: int = 1
    """Ranks over which experts are cut."""
    cut: Cut | None = None
    """Of rows over ranks of cp, which exchange keys and values; None: attention is as over whole
    rows."""
    way: AttentionWay = "ring"
    """Method of the exchange."""
    stride: int = 1
    """Key heads that ``gather`` has at a time."""
    fused_norms: bool = False
    """RMSNorm is one kernel, as on CUDA, which keeps its input alone; a CPU keeps fp32 copies."""

    @property
    def cp(self) -> int:
        """Ranks over which rows are cut."""
        return 1 if self.cut is None else self.cut.ranks


def block_on_meta(
    block: BlockSpec | TransformersBlock,
    width: int,
    batch: MetaMicroBatch,
    axes: Mapping[str, Axis],
) -> tuple[nn.Module, Tensor, Context]:
    """Return a block on device meta, its input and the context of a micro-batch.

    Args:
        block: what it is made of.
        width: D.
        batch: the micro-batch.
        axes: ``tp``, ``ep`` where experts are cut, and ``cp`` where rows are; without a group.

    Returns:
        The block, x (T, D) or (T/t, D), which requires a gradient, and the context.
    """
    mode, tp = batch.mode, axes["tp"]
    if isinstance(block, TransformersBlock):
        foreign, x, context = transformers_block_on_meta(
            block, batch.rows, batch.sequence, batch.dtype, batch.recompute, axes, mode
        )
        return _adapted(foreign, batch, tp), x, context
    build = Build(tp, mode, dtype=batch.dtype, shapes_only=True)
    if "ep" in axes:
        build = replace(build, ep=axes["ep"])
    layer = Block(_computed_by_torch(block), width, build, recompute=batch.recompute)
    _adapted(layer, batch, tp)
    places = torch.arange(batch.sequence, device="meta").expand(batch.rows, batch.sequence)
    context = Context(
        places, torch.arange(batch.rows, device="meta"), dropout_key=0, cut=_cut_of(batch, axes)
    )
    tokens = batch.rows * batch.sequence
    held = -(-tokens // tp.size) if mode.sequence_parallel else tokens
    dtype = batch.residual or batch.dtype
    x = torch.empty(held, width, dtype=dtype, device="meta", requires_grad=True)
    return layer, x, context


def _cut_of(batch: MetaMicroBatch, axes: Mapping[str, Axis]) -> SequenceCut | None:
    """Return the cut of rows. A strip is one block, as it is of short rows: blocks of long ones are
    smaller, of which there are more."""
    cut = batch.cut
    if cut is None or cut.ranks == 1:
        return None
    places = torch.arange(cut.sequence, device="cpu").expand(batch.rows, cut.sequence)
    layout = replace(cut.layout, block=max(cut.layout.block, cut.strip_length))
    return SequenceCut(axes["cp"], places, batch.way, layout, batch.stride)


def _adapted(layer: nn.Module, batch: MetaMicroBatch, tp: Axis) -> nn.Module:
    """Give a block its adapters in place."""
    if batch.adapter is not None:
        adapt([("layers.0", layer)], batch.adapter, tp)
    return layer


def run_on_meta(spec: TransformersSpec, tp: int, ep: int, mode: TPMode) -> None:
    """Run a layer of each class of the first of so many ranks on a few tokens.

    Raises:
        ValueError: as ``layers_on_meta``; or a layer cannot compute in this mode.
    """
    seen = set[type]()
    for _, layer in layers_on_meta(spec, tp, ep, mode):
        if not isinstance(layer, LayerEntry) or type(layer.block) in seen:
            continue
        seen.add(type(layer.block))
        dtype = next(layer.parameters()).dtype
        try:
            given = input_on_meta(layer, 1, TOKENS, spec.hidden_size, dtype)
            with OneKernel(norms=False), torch.no_grad():
                layer(*given)
        except (RuntimeError, TypeError):
            continue  # device meta lacks what this family calls: nothing is known


def communicating_alike(spec: TransformersSpec) -> TransformersSpec:
    """Return a model that communicates the same over tp, ep and pp, and never asks for values.

    Its attention is computed here: masks of transformers ask tensors for their values. It is run
    once, without ranks and with a few tokens.

    Raises:
        ValueError: there is none.
    """
    own = replace(spec, attention=OWN_ATTENTION)
    try:
        stack = LayerStack(layers_on_meta(own))
        stack.fill_buffers(torch.device("meta"))
        tokens = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
        with OneKernel(norms=False), torch.no_grad():
            stack(tokens, Context(torch.arange(TOKENS, device="meta")[None]))
    except (RuntimeError, TypeError, ValueError) as error:  # of torch, transformers or ours
        raise ValueError(str(error).split("\n")[0].removesuffix(ADVICE)) from None
    return own


class _MetaAttention(torch.autograd.Function):
    """Stands for a fused kernel: it keeps its inputs, its output and a number a query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


class _Norm(torch.autograd.Function):
    """Stands for a fused RMSNorm: it keeps its input and a number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return grads[0] + x, None if weight is None else torch.empty_like(weight)


class _GroupedProducts(torch.autograd.Function):
    """Stands for products of rows with the matrix of their group, which torch has in bf16 alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(len(x), weight.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors)


class OneKernel(TorchFunctionMode):
    """Lets one kernel compute attention, grouped products, and with ``norms`` RMSNorm: device meta
    has none, or not in every dtype."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        self._norms = norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _MetaAttention.apply(*args[:3])
        if func is F.rms_norm and self._norms:
            return _Norm.apply(args[0], args[2] if len(args) > 2 else kwargs.get("weight"))
        if func in GROUPED and args[0].dtype != torch.bfloat16:
            return _GroupedProducts.apply(*args[:2])
        return func(*args, **kwargs)


def run_backward(y: Tensor) -> None:
    """Run the backward of y (any shape) in the modes that are on.

    ``Tensor.backward`` and ``torch.autograd.backward`` set modes of functions aside, and what is
    computed again would then have other kernels than the forward.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (y,), (torch.empty_like(y),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _computed_by_torch(block: BlockSpec) -> BlockSpec:
    """The same block; attention kernels that device meta has not keep what torch's own keeps."""
    mixer: Any = block.mixer
    if getattr(mixer, "backend", "plain") == "plain":
        return block
    return replace(block, mixer=replace(mixer, backend="sdpa"))
