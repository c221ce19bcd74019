"""Attention where the rows of a micro-batch are cut over ranks: ``kenotron_cp`` computes it.

Shapes: B rows, n tokens of a row on this rank, H query heads, G key and value heads, K features.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kenotron_cp
from kenotron_dist.rng import uniform
from kenotron_models.attention_mask import Sight, starts_of
from kenotron_models.attention_reference import Dropout


def attend_cut(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    sight: Sight,
    scale: float,
    *,
    plain: bool = False,
    dropout: Dropout | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` over the keys that each query sees, wherever they are.

    Collective over the axis of ``sight.context.cut``.

    Args:
        q_BSHK: this rank's queries (B, n, H, K).
        k_BSGK: its keys (B, n, G, K).
        v_BSGK: its values (B, n, G, K).
        sight: what tokens see; its context has a cut.
        scale: factor of the scores.
        plain: compute as the formula has it, without torch's own attention.
        dropout: what is dropped of the probabilities.
        cap: scores s become cap * tanh(s / cap); None: they stay.
        sinks: a score (H,) that takes its share of every softmax; None: none. Its gradient is that
            of this rank's queries.

    Returns:
        (B, n, H, K); padding and rows that see nothing give 0.

    Raises:
        ValueError: heads that the way ``ulysses`` cannot divide.
    """
    cut = sight.context.cut
    assert cut is not None
    return kenotron_cp.attend(
        q_BSHK,
        k_BSGK,
        v_BSGK,
        cut.axis,
        sight_of_rows(sight),
        kenotron_cp.Scoring(
            scale, cap, sinks, None if dropout is None else _global_dropout(dropout)
        ),
        way=cut.way,
        layout=cut.layout,
        kernel=kenotron_cp.PLAIN if plain else None,
        stride=cut.stride,
    )


def sight_of_rows(sight: Sight) -> kenotron_cp.Sight:
    """Return what tokens of the whole rows see, made once for all layers of a micro-batch."""
    cut = sight.context.cut
    assert cut is not None

    def make() -> kenotron_cp.Sight:
        starts = starts_of(cut.whole_positions_BS) if sight.documents else None
        several = starts is not None and bool(starts.any())
        return kenotron_cp.Sight(cut.sequence, sight.window, starts if several else None)

    return sight.context.once(("sight of rows", sight.window, sight.documents), make)


def _global_dropout(dropout: Dropout) -> kenotron_cp.Dropout:
    """The same choice as ``Dropout.keep``, by places of the whole rows."""

    def keep(rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        samples = dropout.samples_B.to(rows.device)[rows][:, None, None, None]
        whose = (heads + dropout.first_head)[None, :, None, None]
        kept = uniform(dropout.key, samples, whose, queries[:, None], keys) >= dropout.p
        return torch.broadcast_to(kept, (len(rows), len(heads), len(queries), len(keys)))

    return kenotron_cp.Dropout(dropout.p, keep)
