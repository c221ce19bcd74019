"""Attention as the formula has it, and dropout of its probabilities.

Shapes: B rows, S tokens of a row, L keys, H query heads, G key and value heads, K features of a
head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_cp import Dropout, Scoring
from kenotron_dist.rng import counter_key, uniform
from kenotron_dist.rng import dropout as scaled_where_kept
from kenotron_models.attention_mask import AttentionMask
from kenotron_models.context import Context


def dropout_of(context: Context, p: float, layer: int, first_head: int) -> Dropout | None:
    """Return what a layer drops of this micro-batch; None: nothing.

    It is a function of the step, the layer, the sample, the head, and the places of query and key.

    Args:
        context: the micro-batch.
        p: share of the probabilities that is dropped, in [0, 1).
        layer: number of the layer.
        first_head: global number of the first query head held here.

    Raises:
        ValueError: the context has a key and no sample numbers.
    """
    samples_B = context.samples_B
    if p == 0 or context.dropout_key is None:
        return None
    if samples_B is None:
        raise ValueError(
            f"attention_dropout {p}: the context has a dropout_key and no samples_B: give the "
            "global number of every row's sample"
        )
    key = counter_key(context.dropout_key, "attention", layer)

    def keep(rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        samples = samples_B.to(rows.device)[rows][:, None, None, None]
        kept = uniform(key, samples, heads[:, None, None], queries[:, None], keys) >= p
        return torch.broadcast_to(kept, (len(rows), len(heads), len(queries), len(keys)))

    return Dropout(p, keep, first_head)


def attend_plain(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: AttentionMask, scoring: Scoring
) -> Tensor:
    """Compute ``attend_masked`` over the tokens that are seen: (B, S, H, K).

    Memory grows with S^2 for each head.
    """
    batch, sequence, heads = q_BSHK.shape[:3]
    kept, dropout = None, scoring.dropout
    if dropout is not None:
        places = torch.arange(sequence, device=q_BSHK.device)
        kept = torch.cat(  # one head at a time: its random numbers take several times its scores
            [dropout.kept(batch, range(h, h + 1), places, places) for h in range(heads)], 1
        )
    k_BGSK, v_BGSK = k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
    return attend_masked(q_BSHK, k_BGSK, v_BGSK, sight.full_mask_BSS[:, None], scoring, kept)


def attend_masked(
    q_BSHK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute scores, softmax and sum in fp32 (fp64 for fp64): (B, S, H, K) in the dtype of q.

    Args:
        q_BSHK: queries.
        k_BGLK: keys.
        v_BGLK: their values.
        mask: which of them each query sees, bool, broadcast to (B, H, S, L); None: all.
        scoring: what changes the scores.
        kept: which probabilities its dropout keeps, bool (B, H, S, L); None: all.
    """
    wide = torch.promote_types(q_BSHK.dtype, torch.float32)
    ratio = q_BSHK.shape[2] // k_BGLK.shape[1]
    q = q_BSHK.to(wide).transpose(1, 2).contiguous()
    k, v = (x.to(wide).repeat_interleave(ratio, 1) for x in (k_BGLK, v_BGLK))
    device = q.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # meta has none
        shares = shares_of(q @ k.transpose(-1, -2), mask, scoring)
        if scoring.dropout is not None and kept is not None:
            shares = scaled_where_kept(shares, scoring.dropout.p, kept)
        return (shares @ v).transpose(1, 2).to(q_BSHK.dtype)


def shares_of(products: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Return the softmax of the scores of S queries and L keys, (B, H, S, L).

    Args:
        products: of queries and keys (B, H, S, L).
        mask: which keys are seen, bool, broadcast to the products; None: all.
        scoring: what changes the scores; its dropout is left to the caller.
    """
    scores = products * scoring.scale
    if scoring.cap is not None:
        scores = scoring.cap * (scores / scoring.cap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is None:
        return scores.softmax(-1)
    column = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
