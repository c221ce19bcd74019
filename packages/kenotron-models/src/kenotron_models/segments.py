"""Pieces of rows that a recurrent mixer reads one after the other, and where documents begin.

Shapes: B rows, S tokens of a row, n tokens of this rank, P pieces of a row on this rank (1, or 2 of
a zig-zag cut, for each virtual rank of it) of L tokens each, n = P L.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_cp import Cut
from kenotron_dist import Axis, to_device
from kenotron_models.attention_mask import AttentionMask, starts_of
from kenotron_models.context import Context


@dataclass(frozen=True, eq=False)
class Segments:
    """Cut of rows over an axis: all pieces of a row, and those that this rank holds."""

    axis: Axis
    """The ranks over which rows are cut."""
    pieces: int
    """P."""
    order: list[int]
    """Index of each piece of a row, from the first, among those of all ranks."""
    held: tuple[int, ...]
    """Pieces of a row that this rank holds, from 0, in the order of its tokens."""


def segments_of(context: Context) -> Segments | None:
    """Return how the rows of a micro-batch are cut; None: this rank has whole rows."""
    if (cut := context.cut) is None:
        return None
    made = Cut(cut.sequence, max(cut.virtual, cut.axis.size), cut.layout)
    of_ranks = [piece for rank in range(made.ranks) for piece in made.held(rank)]
    order = [of_ranks.index(piece) for piece in range(len(of_ranks))]
    own = len(of_ranks) // cut.axis.size
    held = tuple(of_ranks[own * cut.axis.rank :][:own])
    return Segments(cut.axis, own, order, held)


def tokens_since_start(context: Context, *, documents: bool) -> Tensor | None:
    """Return how many tokens of its document precede each token, made once per micro-batch.

    Args:
        context: the micro-batch. Padding of a cut row is a document of its own.
        documents: whether documents are separate.

    Returns:
        (B, n), or (1, n) where rows are equal, int64. None: every token of a row follows all
        tokens before it.
    """
    if not documents or context.cache is not None:
        return None
    return context.once("tokens since start", lambda: _since(context))


def _since(context: Context) -> Tensor | None:
    if (cut := context.cut) is None:
        first = AttentionMask(context, documents=True).first_BS
        if first is None:
            return None
        return torch.arange(first.shape[1], device=first.device) - first
    starts = starts_of(cut.whole_positions_BS)
    if not starts.any():
        return None
    places = cut.places_S.clamp(max=cut.sequence - 1)
    since = (places - starts[:, places]).masked_fill(cut.places_S >= cut.sequence, 0)
    return to_device(since, context.positions_BS.device)
