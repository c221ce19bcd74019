"""Virtual chunks: the tokens of a rank of cp as several virtual ranks of cp have them.

Rows are cut over C virtual ranks, a power of two; each of c ranks has k = C/c of them, one after
the other. A layer computes each chunk by itself, so that products and norms have one shape on every
number of ranks, and hands over the gradients of parameters chunk by chunk
(``kenotron_dist.separate_uses``).

Shapes: T tokens of this rank in k chunks of n; ``...`` any. Attention over all of them has m tokens
in the order of the sequence: all T, or on one rank those that are no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron_dist import to_device
from kenotron_dist.separate_uses import separate_use
from kenotron_models.context import Context
from kenotron_models.dropout import TOKEN_PLACES, token_places
from kenotron_models.with_values import Module, with_values


class ChunkOrder(NamedTuple):
    """Order of tokens for attention over all chunks of a rank."""

    order: Tensor
    """Place among the T of each of the m tokens in the order of the sequence, int64."""
    inverse: Tensor
    """Place among the m of each of the T tokens, int64; m for padding that is left out."""
    count: int
    """k."""


def split_chunks(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the chunks (n, ...) of x (T, ...), in storage of their own; ``count``: k."""
    return _SplitChunks.apply(x, count)


def join_chunks(parts: Sequence[Tensor]) -> Tensor:
    """Return all tokens (T, ...) of chunks (n, ...); gradients have storage of their own."""
    return _JoinChunks.apply(*parts)


def in_order(parts: Sequence[Tensor], how: ChunkOrder) -> Tensor:
    """Return (B, m, ...) in the order of the sequence, of chunks (B, n, ...)."""
    return _InOrder.apply(how, *parts)


def by_chunk(x: Tensor, how: ChunkOrder) -> tuple[Tensor, ...]:
    """Return chunks (B, n, ...) of x (B, m, ...); padding that was left out is 0."""
    return _ByChunk.apply(how, x)


def copies_by_chunk(module: Module, count: int) -> list[Module]:
    """Return k copies of a module, whose parameters have a gradient for each.

    Those of layers with ``separates_uses``, which take separate uses themselves, stay as they are.
    """
    own = {
        f"{path}.{name}" if path else name: parameter
        for path, each in module.named_modules()
        if not getattr(each, "separates_uses", False)
        for name, parameter in each.named_parameters(recurse=False)
    }
    return [
        with_values(module, {name: separate_use(p, number) for name, p in own.items()})
        for number in range(count)
    ]


def in_chunks(
    layer: Module,
    x: Tensor,
    context: Context,
    run: Callable[[Module, Tensor, Context], Tensor] | None = None,
) -> Tensor:
    """Return what a layer that treats each token alone makes of x (T, ...), chunk by chunk.

    ``run``: a method of its class; None: ``forward``.
    """
    count = context.chunks
    copies, parts = copies_by_chunk(layer, count), split_chunks(x, count)
    contexts = contexts_of_chunks(context)
    # Hooks of the layer have run.
    each = zip(copies, parts, contexts, strict=True)
    return join_chunks([(run or _forward)(copy, part, own) for copy, part, own in each])


def _forward(layer: Module, x: Tensor, context: Context) -> Tensor:
    return layer.forward(x, context)


def contexts_of_chunks(context: Context) -> list[Context]:
    """Return the context of each chunk of a micro-batch, made once: whole rows as long as it."""

    def make() -> list[Context]:
        positions = context.positions_BS.chunk(context.chunks, 1)
        padding = [None] * len(positions)
        if context.padding_BS is not None:
            padding = context.padding_BS.chunk(context.chunks, 1)
        places = [{}] * len(positions)
        if context.dropout_key is not None:
            samples, places_T = token_places(context)
            each = zip(samples.chunk(context.chunks), places_T.chunk(context.chunks), strict=True)
            places = [{TOKEN_PLACES: found} for found in each]
        return [
            replace(
                context, positions_BS=each.contiguous(), host_positions_BS=None, cut=None,
                chunks=0, padding_BS=empty, kept={}, _made={**own},
            )
            for each, empty, own in zip(positions, padding, places, strict=True)
        ]  # fmt: skip

    return context.once("contexts of chunks", make)


def chunk_order(context: Context) -> ChunkOrder:
    """Return the order of a micro-batch's tokens for attention, made once."""
    cut = context.cut
    assert cut is not None  # rows with chunks are cut

    def make() -> ChunkOrder:
        places, device = cut.places_S, context.positions_BS.device
        order = places.argsort()[: cut.local]
        inverse = torch.full_like(places, len(order))
        inverse[order] = torch.arange(len(order))
        there = to_device(order, device), to_device(inverse, device)
        return ChunkOrder(*there, context.chunks)

    return context.once("order of chunks", make)


class _SplitChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return _apart(x, count, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(grads), None


class _JoinChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _apart(grads[0], ctx.count, 0)


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: ChunkOrder, *parts: Tensor) -> Tensor:
        ctx.how = how
        return torch.cat(parts, 1).index_select(1, how.order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_chunked(grads[0], ctx.how)


class _ByChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: ChunkOrder, x: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        return _chunked(x, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, torch.cat(grads, 1).index_select(1, ctx.how.order)


def _chunked(x: Tensor, how: ChunkOrder) -> tuple[Tensor, ...]:
    """Chunks (B, n, ...) of x (B, m, ...)."""
    if len(how.order) < len(how.inverse):  # padding is left out: what stands for it is 0
        x = torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1)
    return _apart(x.index_select(1, how.inverse), how.count, 1)


def _apart(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    """Copies of equal parts: storage begins where kernels want it."""
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in x.chunk(count, dim))
