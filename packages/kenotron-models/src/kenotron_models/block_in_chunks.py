"""A block whose tokens are computed chunk by chunk, and together in attention alone.

Shapes: T tokens of this rank in k chunks (``virtual_chunks``), B = 1 row, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kenotron_models.attention import Attention
from kenotron_models.context import Context
from kenotron_models.recompute import Recompute, whole
from kenotron_models.virtual_chunks import (
    by_chunk,
    chunk_order,
    contexts_of_chunks,
    copies_by_chunk,
    in_order,
    join_chunks,
    split_chunks,
)


class Parted(Protocol):
    """A block: its parts by name, and what it computes again."""

    parts: tuple[str, ...]
    mixer: str | None
    recompute: Recompute

    def get_submodule(self, target: str) -> nn.Module:
        """Return a part, or a norm of one."""
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
    count, contexts = context.chunks, contexts_of_chunks(context)
    norms, parts, posts = (
        copies_by_chunk(block.get_submodule(path), count)
        for path in (f"{name}_norm", name, f"{name}_post_norm")
    )
    pairs = zip(norms, split_chunks(x, count), strict=True)
    xs = [norm.forward(part) for norm, part in pairs]
    first = parts[0]
    if isinstance(first, Attention):
        ys = _mixed(parts, xs, contexts, context)
    else:
        each = zip(parts, xs, contexts, strict=True)
        ys = [part.forward(own, of_chunk) for part, own, of_chunk in each]
    y = join_chunks([post.forward(part) for post, part in zip(posts, ys, strict=True)])
    return block.drop(y, context, name)


def _mixed(
    parts: Sequence[Any], xs: Sequence[Tensor], contexts: Sequence[Context], context: Context
) -> list[Tensor]:
    """Attention of the chunks (n, D), whose tokens see one another."""
    heads, gates = [], []
    for part, x, own in zip(parts, xs, contexts, strict=True):
        *found, gate = part.heads_of(x, own)
        heads.append(found)
        gates.append(gate)
    how, mixer = chunk_order(context), parts[0]
    mixed = mixer.mix(*(in_order(each, how) for each in zip(*heads, strict=True)), context)
    each = zip(parts, by_chunk(mixed, how), gates, strict=True)
    return [part.output(own, gate) for part, own, gate in each]
