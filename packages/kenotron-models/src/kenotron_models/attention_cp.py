"""Attention where the rows of a micro-batch are cut over ranks: ``kenotron_cp`` computes it.

Shapes: B rows, n tokens of a row on this rank, H query heads, G key and value heads, K features.
"""

from __future__ import annotations

from torch import Tensor

import kenotron_cp
from kenotron_models.attention_backends import AttentionBackend
from kenotron_models.attention_mask import AttentionMask, starts_of


def attend_cut(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    sight: AttentionMask,
    scoring: kenotron_cp.Scoring,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """``softmax(scale * q k^T) v`` over the keys that each query sees, wherever they are.

    Collective over the axis of ``sight.context.cut``.

    Args:
        q_BSHK: this rank's queries (B, n, H, K).
        k_BSGK: its keys (B, n, G, K).
        v_BSGK: its values (B, n, G, K).
        sight: what tokens see; its context has a cut.
        scoring: what changes the scores. The gradient of its sinks is that of this rank's queries.
        backend: with ``plain`` torch's own attention is not used; all others mean the same.

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
        scoring,
        way=cut.way,
        layout=cut.layout,
        kernel=kenotron_cp.PLAIN if backend == "plain" else None,
        stride=cut.stride,
        copies=cut.copies(q_BSHK.shape[2], k_BSGK.shape[2]),
    )


def sight_of_rows(sight: AttentionMask) -> kenotron_cp.Visibility:
    """Return what tokens of the whole rows see, made once for all layers of a micro-batch."""
    cut = sight.context.cut
    assert cut is not None

    def make() -> kenotron_cp.Visibility:
        starts = starts_of(cut.whole_positions_BS) if sight.documents else None
        several = starts is not None and bool(starts.any())
        return kenotron_cp.Visibility(cut.sequence, sight.window, starts if several else None)

    return sight.context.once(("sight of rows", sight.window, sight.documents), make)
