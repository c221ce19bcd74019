"""States that enter the pieces of a row which is cut over ranks.

Each piece is an affine map of the state before it: ``h -> factor h + last``. All ranks get the maps
of all pieces in one all-gather, whose size does not depend on the number of tokens, and apply those
of earlier pieces in order.

Shapes: B rows, P pieces of a row on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist.autograd import all_gather_from
from kenotron_models.segments import Segments


def entering_states(
    last: Tensor,
    factor: Tensor,
    segments: Segments,
    *,
    apply: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> Tensor:
    """Return the state before each of this rank's pieces. Collective over the axis of the cut.

    Args:
        last: state after each piece when that before it is 0, (B P, ...), fp32.
        factor: what becomes of the state before a piece in the one after it, (B P, ...), fp32.
        segments: how rows are cut.
        apply: makes a state of a factor and a state: by elements, or ``torch.matmul``.

    Returns:
        (B P, ...), of the shape of ``last``.
    """
    flat = flat_map(last, factor)
    own = flat.unflatten(0, (-1, segments.pieces)).movedim(1, 0)  # (P, B, ...)
    every = all_gather_from(own.contiguous(), segments.axis)[segments.order]
    before = states_before(every, last.shape[1:], factor.shape[1:], apply)
    return torch.stack([before[piece] for piece in segments.held], 1).flatten(0, 1)


def flat_map(last: Tensor, factor: Tensor) -> Tensor:
    """Return the maps of pieces as one tensor (P, F); arguments as for ``entering_states``."""
    return torch.cat([last.flatten(1), factor.flatten(1)], 1)


def states_before(
    every: Tensor,
    state: torch.Size,
    factor: torch.Size,
    apply: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> list[Tensor]:
    """Return the state before each of all pieces of rows, in order.

    Args:
        every: their maps (N, ..., F), as ``flat_map`` returns them.
        state: shape of one state, without ``...``.
        factor: shape of one factor, without ``...``.
        apply: see ``entering_states``.
    """
    # A piece of zeros before the first, which is part of the graph: a rank that holds the first
    # piece alone must take part in the backward's exchange as well.
    every = F.pad(every, (0, 0) * (every.ndim - 1) + (1, 0))
    lasts, factors = every.split((state.numel(), factor.numel()), -1)
    lasts, factors = lasts.unflatten(-1, state), factors.unflatten(-1, factor)
    before = [lasts[0]]
    for each, of_piece in zip(lasts[1:-1], factors[1:-1], strict=True):
        before.append(apply(of_piece, before[-1]) + each)
    return before
