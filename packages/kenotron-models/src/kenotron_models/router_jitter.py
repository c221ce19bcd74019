"""Noise on what a router reads, the same on every layout (ST-MoE, arXiv 2202.08906, section 4.2).

A factor is a function of (seed, step, layer, sample, place in the row, feature) alone, as the masks
of dropout are: neither layout, micro-batches, recomputation nor resume change it.

Shapes: n tokens that this rank routes, T tokens of this rank of cp, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Axis
from kenotron_dist.rng import counter_key, uniform
from kenotron_models.context import Context
from kenotron_models.dropout import TOKEN_PLACES, token_places


def jitter_factors(x: Tensor, size: float, context: Context, name: str, tp: Axis) -> Tensor | None:
    """Return random factors (n, D), fp32, uniform in (1 - size, 1 + size).

    Args:
        x: tokens (n, D) that this rank of ``tp`` routes, of T in the order of ranks.
        size: half the width of the interval; 0: no noise.
        context: the micro-batch.
        name: what tells this layer from others.
        tp: the ranks that the T tokens are cut over.

    Returns:
        None without noise, and for a context without ``dropout_key``, as in an evaluation.

    Raises:
        ValueError: the context does not number its samples.
    """
    if size == 0 or context.dropout_key is None:
        return None
    samples, places = context.once(TOKEN_PLACES, lambda: token_places(context))
    own = slice(tp.rank * len(x), (tp.rank + 1) * len(x))
    samples, places = samples[own], places[own]  # fewer than n at the end, where tp does not divide
    features = torch.arange(x.shape[1], device=x.device)
    key = counter_key(context.dropout_key, name)
    drawn = uniform(key, samples[:, None], places[:, None], features[None])
    return F.pad(1 + size * (2 * drawn - 1), (0, 0, 0, len(x) - len(drawn)), value=1.0)
