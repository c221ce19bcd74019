"""Mixers with a state, whose tokens are computed in virtual chunks.

A piece of a row takes two things from earlier ones: tokens for its convolution, and the state. Both
are functions of all pieces of the row. Every rank computes them, and in the backward their
gradients, of what all ranks have: sums are in the order of the sequence on every number of ranks.

Shapes: k chunks (``virtual_chunks``) of n tokens on this rank, B = 1 row, P pieces of a chunk
(``segments``) of L tokens each, N pieces of the row, D hidden; ``...`` any.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import all_gather
from kenotron_models.context import Context
from kenotron_models.recurrent import Recurrent, pieces_of
from kenotron_models.segments import Segments, segments_of, tokens_since_start
from kenotron_models.short_convolution import ends_before, ends_of
from kenotron_models.state_passing import flat_map, states_before

OfPieces = Callable[[Tensor], Tensor]
"""Makes of what all pieces of a row send (N, ...), in order, what each of them reads (N, ...)."""
Inside = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Makes of what virtual shards add up inside a mixer what each of them reads of the sum."""


class Wanted(NamedTuple):
    """A request for what a chunk lacks, of one of its virtual shards."""

    x: Tensor
    """What it gives: of each of its pieces (P, ...), or a part of a sum."""
    of_pieces: OfPieces | None = None
    """Makes what it gets (P, ...); None: ``Inside`` does."""


Run = Generator[Wanted | Tensor, Tensor, None]
"""Asks for what a chunk lacks; the last of what it yields is the output (n, D)."""


def states_in_chunks(
    parts: Sequence[Sequence[Recurrent]],
    xs: Sequence[Sequence[Tensor]],
    insides: Sequence[Inside | None],
    context: Context,
) -> list[tuple[Tensor, ...]]:
    """Return the outputs (n, D) of each shard and chunk. Collective over the axis of the cut.

    Args:
        parts: the mixer of each chunk, in virtual shards.
        xs: tokens (n, D) of each chunk and shard.
        insides: of each chunk; None: there is one shard, which adds up nothing.
        context: of all chunks.
    """
    segments, count = segments_of(context), context.chunks
    assert segments is not None  # rows with chunks are cut
    each = segments.pieces // count  # P
    places: Sequence[Tensor | None] = [None] * count
    since = tokens_since_start(context, documents=parts[0][0].separate_documents)
    if since is not None:
        places = [pieces_of(own, each) for own in since.chunk(count, 1)]
    runs = [
        [_computed(part, x, each, place) for part, x in zip(own, tokens, strict=True)]
        for own, tokens, place in zip(parts, xs, places, strict=True)
    ]
    # All shards of all chunks ask for the same, one thing after the other.
    found: list[list[Any]] = [[next(run) for run in own] for own in runs]
    while isinstance(asked := found[0][0], Wanted):
        given = [[wanted.x for wanted in own] for own in found]
        if asked.of_pieces is None:
            triples = zip(parts, insides, given, strict=True)
            got = [_summed(own, inside, values) for own, inside, values in triples]
        else:
            shards = zip(*given, strict=True)
            made = [_ExchangeStates.apply(asked.of_pieces, segments, *chunks) for chunks in shards]
            got = [*zip(*made, strict=True)]
        found = [
            [run.send(x) for run, x in zip(own, answers, strict=True)]
            for own, answers in zip(runs, got, strict=True)
        ]
    return [*zip(*found, strict=True)]


def _computed(part: Recurrent, x: Tensor, count: int, places: Tensor | None) -> Run:
    """Compute the output of a chunk x (n, D).

    ``count``: P. ``places``: tokens of its document before each one (P, L); None: all belong to it.
    """
    x, steps, gate = part.opened(x, (1, len(x)), None)
    goes_on = None if places is None else places > 0
    # Convolution: the last tokens of earlier pieces are before those of each.
    rows, width = pieces_of(x, count), part.conv.width - 1
    before = rows.new_zeros(count, 0, rows.shape[-1])
    if width:
        before = yield Wanted(ends_of(rows, width), partial(_tokens_before, width))
    rows = F.silu(part.conv(rows, before, places))
    steps = None if steps is None else pieces_of(steps, count)
    if (added := part.added_before(rows)) is not None:
        steps = yield Wanted(added)
    # States: the map of each piece by itself, then its scan from the state that enters it.
    state, factor = part.state_map(rows, steps, goes_on)
    shapes = state.shape[1:], factor.shape[1:]
    entering = partial(_states_before, *shapes, part.passed)
    first = yield Wanted(flat_map(state, factor), entering)
    y = part.scan(rows, steps)(first=first, goes_on=goes_on).y
    y, gate = y.reshape(len(x[0]), -1), gate.flatten(0, 1)
    if (added := part.added_after(y, gate)) is not None:
        added = yield Wanted(added)
    yield part.output(y, gate, part.means(y, gate, added=added))


def _summed(
    parts: Sequence[Recurrent], inside: Inside | None, given: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return what each virtual shard of a chunk reads of the sum of all; they are a chunk's."""
    return [parts[0].of_sum(given[0], 1)] if inside is None else inside(given)


def _tokens_before(width: int, every: Tensor) -> Tensor:
    """Return the ``width`` tokens before each piece (N, W - 1, C) of the ends (N, kept, C)."""
    return ends_before(every[:, None], width, range(len(every)))[0]


def _states_before(
    state: torch.Size,
    factor: torch.Size,
    apply: Callable[[Tensor, Tensor], Tensor],
    every: Tensor,
) -> Tensor:
    """Return the state before each piece (N, ...) of the maps (N, F)."""
    return torch.stack(states_before(every, state, factor, apply))


class _ExchangeStates(torch.autograd.Function):
    """Exchange over chunks of all ranks: each sends (P, ...), and reads (P, ...) made of all."""

    @staticmethod
    def forward(
        ctx: Any, of_pieces: OfPieces, segments: Segments, *chunks: Tensor
    ) -> tuple[Tensor, ...]:
        every = _of_all(chunks, segments)
        ctx.save_for_backward(every)
        ctx.made = of_pieces, segments, len(chunks)
        return _own(of_pieces(every), segments, len(chunks))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        of_pieces, segments, count = ctx.made
        (every,) = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            found = of_pieces(every)
        (grad,) = torch.autograd.grad(found, every, _of_all(grads, segments))
        return None, None, *_own(grad, segments, count)


def _of_all(chunks: Sequence[Tensor], segments: Segments) -> Tensor:
    """Return all pieces of the row in order (N, ...), of chunks (P, ...). Collective."""
    return all_gather(torch.cat(list(chunks)), segments.axis)[segments.order]


def _own(x: Tensor, segments: Segments, count: int) -> tuple[Tensor, ...]:
    """Return this rank's ``count`` chunks (P, ...) of all pieces (N, ...), in own storage."""
    each = len(segments.held) // count
    return tuple(
        x[list(segments.held[begin : begin + each])] for begin in range(0, count * each, each)
    )
