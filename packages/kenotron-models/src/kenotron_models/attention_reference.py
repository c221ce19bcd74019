"""Attention as the formula has it, and dropout of its probabilities.

Shapes: B rows, S tokens of a row, H query heads, G key and value heads, K features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_dist.rng import counter_key, uniform
from kenotron_dist.rng import dropout as scaled_where_kept
from kenotron_models.attention_mask import Sight
from kenotron_models.context import Context


@dataclass(frozen=True)
class Dropout:
    """Which probabilities are dropped: a function of key, sample, head, query's and key's place."""

    p: float
    """Share that is dropped, in (0, 1)."""
    key: int
    """``counter_key`` of the step and the layer."""
    samples_B: Tensor
    """Global numbers of the rows' samples, int64."""
    first_head: int
    """Global number of the first query head held here."""

    def keep(self, head: int, sequence: int) -> Tensor:
        """Bool (B, S, S): what is kept of a head, by its number among those held here."""
        places = torch.arange(sequence, device=self.samples_B.device)
        rows, whose = self.samples_B[:, None, None], torch.full_like(places, self.first_head + head)
        return uniform(self.key, rows, whose, places[:, None], places) >= self.p


def dropout_of(context: Context, p: float, layer: int, first_head: int) -> Dropout | None:
    """What a layer drops of this micro-batch; None: nothing.

    Raises ValueError when the context has a key and no sample numbers.
    """
    if p == 0 or context.dropout_key is None:
        return None
    if context.samples_B is None:
        raise ValueError(
            f"attention_dropout {p}: the context has a dropout_key and no samples_B: give the "
            "global number of every row's sample"
        )
    key = counter_key(context.dropout_key, "attention", layer)
    return Dropout(p, key, context.samples_B, first_head)


def attend_plain(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    sight: Sight,
    scale: float,
    dropout: Dropout | None = None,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scores, softmax and sum in fp32 (fp64 for fp64): (B, S, H, K) in the dtype of q.

    Memory grows with S^2 for each head. ``cap`` and ``sinks``: as ``shares_of`` has them.
    """
    wide = torch.promote_types(q_BSHK.dtype, torch.float32)
    sequence, heads = q_BSHK.shape[1:3]
    q, k, v = (
        x.to(wide).transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)
        for x in (q_BSHK, k_BSGK, v_BSGK)
    )
    device = q.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # meta has none
        scores = (q @ k.transpose(-1, -2)) * scale
        shares = shares_of(scores, sight.full_mask_BSS[:, None], cap, sinks)
        if dropout is not None:
            kept = torch.stack([dropout.keep(head, sequence) for head in range(heads)], 1)
            shares = scaled_where_kept(shares, dropout.p, kept)
        return (shares @ v).transpose(1, 2).to(q_BSHK.dtype)


def shares_of(
    scores: Tensor, mask: Tensor | None, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the softmax of scores (B, H, S, L).

    Args:
        scores: of S queries and L keys.
        mask: which keys are seen, bool, broadcast to the scores; None: all.
        cap: scores s become cap * tanh(s / cap) first; None: they stay.
        sinks: a score (H,) that takes its share of every softmax and has no value; None: none.
    """
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def attend_kept(
    q_BSHK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of new tokens to L that are kept: (B, S, H, K).

    Args:
        q_BSHK: queries.
        k_BGLK: kept keys, the new tokens' own among them.
        v_BGLK: their values.
        mask: which of them each token sees, bool (B, 1, S, L); None: all.
        scale: factor of the scores.
        cap: as in ``shares_of``.
        sinks: as in ``shares_of``.
    """
    wide = torch.promote_types(q_BSHK.dtype, torch.float32)
    ratio = q_BSHK.shape[2] // k_BGLK.shape[1]
    k, v = (x.to(wide).repeat_interleave(ratio, 1) for x in (k_BGLK, v_BGLK))
    scores = (q_BSHK.to(wide).transpose(1, 2) @ k.transpose(-1, -2)) * scale
    mixed = shares_of(scores, mask, cap, sinks) @ v
    return mixed.transpose(1, 2).to(q_BSHK.dtype)
