"""Limit how many choices an expert gets.

T tokens, K choices of a token, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within_capacity(experts_TK: Tensor, capacity: int, weights_TK: Tensor | None = None) -> Tensor:
    """Return the choices with all beyond ``capacity`` of an expert replaced by -1 (dropped).

    A pure function of these tokens: nothing is communicated. Where it is called with the tokens of
    one rank, what is dropped depends on how tokens are distributed over ranks, and so do the
    numbers of a training run. To have the same on every layout, gather the choices of the batch
    first, apply this, and keep one's own rows.

    Args:
        experts_TK: int64, chosen experts, -1 for a choice that is dropped already.
        capacity: choices that each expert keeps, 0 or more.
        weights_TK: if given, those with the largest weights are kept, and the first among equal
            ones. Otherwise the first are kept, by token and, for one token, by k. (Switch and
            GShard order by k and then by token: transpose for that.)

    Returns:
        int64 (T, K).

    Raises:
        ValueError: ``capacity`` below 0, choices that are not (T, K) of int64, or weights of
            another shape.
    """
    if capacity < 0:
        raise ValueError(f"within_capacity: capacity is {capacity}, it must be at least 0")
    if experts_TK.ndim != 2 or experts_TK.dtype != torch.int64:
        raise ValueError(
            f"within_capacity: experts are {tuple(experts_TK.shape)} of {experts_TK.dtype}: give "
            "(T, K) of torch.int64"
        )
    flat = experts_TK.reshape(-1)
    order = torch.arange(flat.shape[0], device=flat.device)
    if weights_TK is not None:
        if weights_TK.shape != experts_TK.shape:
            raise ValueError(
                f"within_capacity: weights are {tuple(weights_TK.shape)} and experts "
                f"{tuple(experts_TK.shape)}: give one for each choice"
            )
        order = torch.argsort(weights_TK.reshape(-1), descending=True, stable=True)
    found, by_expert = torch.sort(flat[order], stable=True)
    # Its place among the choices of its expert: how far it is from the first of them.
    place = torch.arange(flat.shape[0], device=flat.device) - torch.searchsorted(found, found)
    kept = torch.empty_like(flat)
    kept[order[by_expert]] = torch.where(place < capacity, found, -1)
    return kept.view_as(experts_TK)
