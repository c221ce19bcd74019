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
    width = last[0].numel()
    flat = torch.cat([last.flatten(1), factor.flatten(1)], 1)
    own = flat.unflatten(0, (-1, segments.pieces)).movedim(1, 0)  # (P, B, ...)
    every = all_gather_from(own.contiguous(), segments.axis)[segments.order]
    # A piece of zeros before the first, which is part of the graph: a rank that holds the first
    # piece alone must take part in the backward's exchange as well.
    every = F.pad(every, (0, 0, 0, 0, 1, 0))
    lasts = every[..., :width].unflatten(-1, last.shape[1:])
    factors = every[..., width:].unflatten(-1, factor.shape[1:])
    before = [lasts[0]]
    for each, of_piece in zip(lasts[1:-1], factors[1:-1], strict=True):
        before.append(apply(of_piece, before[-1]) + each)
    return torch.stack([before[piece] for piece in segments.held], 1).flatten(0, 1)
