"""Dropout whose masks no layout changes (Srivastava et al., JMLR 2014).

What is kept is a function of (seed, step, name, sample, place in the row, feature) alone.

Shapes: B rows of S tokens, T = B * S, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Axis, to_device
from kenotron_dist.rng import counter_key, dropout, uniform
from kenotron_models.context import Context

TOKEN_PLACES = "token_places"
"""Key of a context's own ``token_places``."""


def drop_features(
    x: Tensor,
    p: float,
    context: Context,
    name: str,
    axis: Axis,
    *,
    sequence_parallel: bool,
    first: int = 0,
) -> Tensor:
    """x (T, D), or (T/t, D) under sequence parallelism, with a share ``p`` of it zero.

    The rest is divided by 1 - p. Nothing is done for a context without ``dropout_key``. ``name``:
    what tells this place of the model from others. ``first``: number of x's first feature. Raises
    ValueError where the context does not number its samples.
    """
    if p == 0 or context.dropout_key is None:
        return x
    samples, places = context.once(TOKEN_PLACES, lambda: token_places(context))
    if sequence_parallel:
        rows = slice(axis.rank * len(x), (axis.rank + 1) * len(x))
        samples, places = samples[rows], places[rows]  # fewer than x has: padding comes last
    features = torch.arange(first, first + x.shape[1], device=x.device)
    key = counter_key(context.dropout_key, name)
    kept = uniform(key, samples[:, None], places[:, None], features[None]) >= p
    return dropout(x, p, F.pad(kept, (0, 0, 0, len(x) - len(kept))))


def token_places(context: Context) -> tuple[Tensor, Tensor]:
    """Sample and place in its row of every token, (T,) int64 each."""
    if context.samples_B is None:
        raise ValueError(
            "dropout needs the number of every row's sample: give the Context samples_B"
        )
    batch, sequence = context.positions_BS.shape
    device = context.positions_BS.device
    places = torch.arange(sequence, device=device)
    if context.cut is not None:  # numbers in the whole row
        places = to_device(context.cut.places_S, device)
    return context.samples_B.repeat_interleave(sequence), places.repeat(batch)
