"""A block whose tokens are computed chunk by chunk, and together in attention alone.

A part of each chunk may be computed in virtual shards (``block_in_shards``): attention then mixes
the chunks of one shard after those of another.

Shapes: T tokens of this rank in k chunks (``virtual_chunks``) of n, B = 1 row, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from kenotron_models.attention import Attention
from kenotron_models.context import Context
from kenotron_models.experts import Experts
from kenotron_models.part import Part
from kenotron_models.recompute import Recompute, whole
from kenotron_models.recurrent import Recurrent
from kenotron_models.states_in_chunks import states_in_chunks
from kenotron_models.virtual_chunks import (
    by_chunk,
    chunk_order,
    contexts_of_chunks,
    copies_by_chunk,
    in_order,
    join_chunks,
    split_chunks,
)
from kenotron_models.with_values import with_values


class Divided(NamedTuple):
    """A part as virtual ranks of tp compute it; one alone is the part itself."""

    pieces: Sequence[Any]
    """The part of each virtual rank of this rank."""
    enter: Callable[[Tensor], Sequence[Tensor]]
    """Makes of the part's input that of each piece."""
    leave: Callable[[Sequence[Tensor]], Tensor]
    """Makes of the outputs of the pieces that of the part."""
    inside: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    """Makes of what pieces add up inside (``Part.begin``) what each of them reads of the sum; None:
    one alone adds up nothing."""


class Parted(Protocol):
    """A block: its parts by name, and what it computes again."""

    parts: tuple[str, ...]
    mixer: str | None
    recompute: Recompute

    def get_submodule(self, target: str) -> nn.Module:
        """Return a part, or a norm of one."""
        ...

    def divided(self, name: str, part: Part) -> Divided:
        """Return the part ``name``, or a copy of it, as virtual ranks compute it."""
        ...

    def drop(self, x: Tensor, context: Context, part: str) -> Tensor:
        """Return what is added of a part's output (T, D)."""
        ...


def block_in_chunks(block: Parted, x: Tensor, context: Context) -> Tensor:
    """Return a block's output (T, D) for x (T, D). Collective over cp in attention."""
    for name in block.parts:
        alone = "mixer" if name == block.mixer else "feed_forward"
        if block.recompute == alone and torch.is_grad_enabled():
            y = whole(_added, block, name, x, context)
        else:
            y = _added(block, name, x, context)
        x = x + y
    return x


def _added(block: Parted, name: str, x: Tensor, context: Context) -> Tensor:
    """Return the output of a part of the block, which is added to its input x (T, D)."""
    count = context.chunks
    norms, parts, posts = (
        copies_by_chunk(block.get_submodule(path), count)
        for path in (f"{name}_norm", name, f"{name}_post_norm")
    )
    pairs = zip(norms, split_chunks(x, count), strict=True)
    xs = [norm.forward(part) for norm, part in pairs]
    divided = [block.divided(name, cast(Part, part)) for part in parts]
    entered = [each.enter(own) for each, own in zip(divided, xs, strict=True)]
    if isinstance(divided[0].pieces[0], Recurrent):
        insides = [each.inside for each in divided]
        found = states_in_chunks([each.pieces for each in divided], entered, insides, context)
    else:
        found = _by_shard(divided, entered, block.get_submodule(name), context)
    ys = [each.leave(own) for each, own in zip(divided, zip(*found, strict=True), strict=True)]
    y = join_chunks([post.forward(part) for post, part in zip(posts, ys, strict=True)])
    return block.drop(y, context, name)


def _by_shard(
    divided: Sequence[Divided],
    xs: Sequence[Sequence[Tensor]],
    whole_part: nn.Module,
    context: Context,
) -> list[list[Tensor]]:
    """Return the outputs (n, D) of each shard and chunk, of a part that passes no states.

    Args:
        divided: of each chunk.
        xs: tokens (n, D) of each chunk and shard.
        whole_part: the part of the block.
        context: of all chunks.
    """
    contexts, found = contexts_of_chunks(context), []
    # Norms over all heads add up over the shards of each chunk before attention mixes the chunks.
    attends = isinstance(divided[0].pieces[0], Attention)
    heads = _heads(divided, xs, contexts) if attends else []
    for shard, first in enumerate(divided[0].pieces):
        pieces, own = [each.pieces[shard] for each in divided], [each[shard] for each in xs]
        if isinstance(first, Attention):
            found.append(_mixed(pieces, heads[shard], context))
        elif isinstance(first, Experts):
            experts = cast(Experts, whole_part)
            found.append(experts.mix_chunks(pieces, own, contexts, context))
        else:
            each = zip(pieces, own, contexts, strict=True)
            found.append([piece.forward(of_it, chunk) for piece, of_it, chunk in each])
    return found


def _heads(
    divided: Sequence[Divided], xs: Sequence[Sequence[Tensor]], contexts: Sequence[Context]
) -> list[tuple[Any, ...]]:
    """Return what attention mixes (``Attention.heads_of``) of each shard and chunk.

    Args:
        divided: of each chunk.
        xs: tokens (n, D) of each chunk and shard.
        contexts: of each chunk.
    """
    found = []
    for (pieces, _, _, inside), own, context in zip(divided, xs, contexts, strict=True):
        pairs = zip(pieces, own, strict=True)
        if inside is None or not pieces[0].adds_inside:
            found.append([piece.heads_of(x, context) for piece, x in pairs])
            continue
        begun = [piece.begin_heads(x, context) for piece, x in pairs]
        known = inside([means for means, _ in begun])
        found.append([heads(means) for (_, heads), means in zip(begun, known, strict=True)])
    return [*zip(*found, strict=True)]


def _mixed(parts: Sequence[Any], found: Sequence[Any], context: Context) -> list[Tensor]:
    """Attention of the chunks, whose tokens see one another: outputs (n, D).

    ``found``: of each, as ``Attention.heads_of`` returns.
    """
    heads, gates = [each[:3] for each in found], [each[3] for each in found]
    how, mixer = chunk_order(context), parts[0]
    if mixer.sinks is not None:  # of each query, so that each chunk has a gradient of its own
        of_queries = [
            _each_query(part.sinks, q) for part, (q, *_) in zip(parts, heads, strict=True)
        ]
        mixer = with_values(mixer, {"sinks": in_order(of_queries, how)})
    mixed = mixer.mix(*(in_order(each, how) for each in zip(*heads, strict=True)), context)
    each = zip(parts, by_chunk(mixed, how), gates, strict=True)
    return [part.output(own, gate) for part, own, gate in each]


def _each_query(sinks: Tensor, q: Tensor) -> Tensor:
    """Return sinks (H,) of each of the queries (B, n, H, K), (B, n, H) in fp32 at least."""
    return sinks.to(torch.promote_types(sinks.dtype, torch.float32)).expand(q.shape[:3])
