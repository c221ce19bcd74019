"""The tokens of a micro-batch that this rank routes to experts.

Shapes: B rows of S tokens of this rank of cp, T = B * S, n tokens that this rank routes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Axis, to_device
from kenotron_models.context import Context


def routed_rows(context: Context, n: int, tp: Axis) -> Tensor | None:
    """Return which of B rows each routed token is of, (n,) int64, and B for padding.

    None: tp cuts no tokens, and none is padding.
    """
    batch, sequence = context.positions_BS.shape
    if tp.size == 1 and context.padding_BS is None:
        return None
    device, first = context.positions_BS.device, tp.rank * n
    token = torch.arange(first, first + n, device=device)
    rows = (token // sequence).clamp(max=batch)  # beyond T the last ranks have padding
    if context.padding_BS is None:
        return rows
    padding = F.pad(context.padding_BS.flatten(), (0, n * tp.size - context.tokens))
    return rows.masked_fill(padding[first : first + n], batch)


def routed_places(context: Context, n: int, tp: Axis) -> Tensor:
    """Return the place of each routed token in its whole row, (n,) int64; padding comes last."""
    (batch, sequence), device = context.positions_BS.shape, context.positions_BS.device
    places, end = torch.arange(sequence, device=device), sequence
    if context.cut is not None:
        places, end = to_device(context.cut.places_S, device), context.cut.sequence
    padded = F.pad(places.repeat(batch), (0, n * tp.size - context.tokens), value=end)
    return padded[tp.rank * n :][:n]
