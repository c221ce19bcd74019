"""A narrow model of the same structure: every relation of sizes that code looks at stays."""

from __future__ import annotations

from dataclasses import dataclass

from kenotron_models import SizedConfig, SmallSizes
from kenotron_train.verify.shrink_layout import few

SEQUENCE = 32
"""Tokens of a sample, at most."""
VOCABULARY = 96
"""Token numbers, or a few more."""
HEAD_DIM, WIDE_HEAD_DIM = 8, 16
"""Features of a head; wide ones where heads are few, or rotary waves are stretched: there are
then some that stay and some that grow."""
MANY_HEADS = 5
MOST_HEADS = 32


@dataclass(frozen=True)
class ModelCut:
    """Sizes that a model is cut by, before and after, and the length of its samples."""

    tp: int
    small_tp: int
    heads_over: int
    """Ranks that heads are cut over: tp, and cp where it exchanges heads."""
    small_heads_over: int
    depth: int
    """Decoder layers after."""
    period: int
    """Every n-th of them has no positions, where any has none."""
    sequence: int
    small_sequence: int
    small_ep: int


def small_model(sizes: SizedConfig, cut: ModelCut, padding: int, small_padding: int) -> SizedConfig:
    """Return the model with few features, heads, layers and token numbers.

    Args:
        sizes: the config of a family.
        cut: what it is cut by.
        padding: multiple (over tp) that the vocabulary is padded to.
        small_padding: the same, after.
    """
    heads, kv_heads = small_heads(
        sizes.num_attention_heads, sizes.kv_heads, cut.heads_over, cut.small_heads_over
    )
    ropes = [getattr(block.mixer, "rope", None) for block in sizes.decoder.blocks]
    stretched = any(rope is not None and rope.scaling is not None for rope in ropes)
    wide = stretched or not ropes or heads < MANY_HEADS  # no blocks: transformers has its own
    vocabulary = small_vocabulary(
        sizes.vocab_size,
        (cut.tp, padding * cut.tp),
        (cut.small_tp, small_padding * cut.small_tp),
    )
    return sizes.small(
        SmallSizes(
            layers=cut.depth,
            period=cut.period,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=WIDE_HEAD_DIM if wide else HEAD_DIM,
            vocab_size=vocabulary,
            tp=cut.small_tp,
            sequence=cut.sequence,
            small_sequence=cut.small_sequence,
            ep=cut.small_ep,
        )
    )


def small_heads(heads: int, kv_heads: int, tp: int, small_tp: int) -> tuple[int, int]:
    """Few heads, and key and value heads: less of these than tp ranks, or not, as before.

    One kv head stays one where several ranks share it; as many as query heads stay as many.
    """
    if kv_heads < tp and small_tp > 1:
        kv = max(1, small_tp * kv_heads // tp)
        while small_tp % kv:
            kv -= 1
        return small_tp * few(heads // tp, 2), kv
    share = kv_heads // tp if kv_heads >= tp else kv_heads
    kv, group = small_tp * few(share, 3), few(heads // kv_heads, 4)
    if kv * group > MOST_HEADS:
        kv, group = small_tp * few(share, 2), few(group, 2)
    return kv * group, kv


def small_vocabulary(size: int, units: tuple[int, int], small_units: tuple[int, int]) -> int:
    """Few token numbers, which divide by tp and by the multiple of padding, or not, as before.

    Arguments: token numbers; tp and the multiple, before and after.
    """
    start = min(size, VOCABULARY)
    wanted = [size % unit == 0 for unit in units]

    def kept(small: int) -> int:
        found = [small % unit == 0 for unit in small_units]
        return sum(a == b for a, b in zip(found, wanted, strict=True))

    near = range(start, start + 2 * small_units[1] + 2)
    return max(near, key=lambda small: (kept(small), -small))
