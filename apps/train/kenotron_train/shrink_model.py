"""A narrow model of the same structure: every relation of sizes that code looks at stays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models import RopeScaling
from kenotron_models.config import LlamaConfig
from kenotron_models.config_starcoder2 import Starcoder2Config
from kenotron_models.registry import AnyConfig
from kenotron_train.shrink_layout import few

SEQUENCE = 32
"""Tokens of a sample, at most."""
VOCABULARY = 96
"""Token numbers, or a few more."""
HEAD_DIM, WIDE_HEAD_DIM = 8, 16
"""Features of a head; wide ones where heads are few, or rotary waves are stretched: there are
then some that stay and some that grow."""
MANY_HEADS = 5
MOST_HEADS = 32
WIDEST = 4.0
"""Most that the feed-forward is wider than the residual stream."""
SHORTEST_ORIGINAL = 16
"""Tokens of the first training of a stretched model: there are waves that stay, and that grow."""


@dataclass(frozen=True)
class Cut:
    """What a model is cut by, before and after, and how long its samples are."""

    tp: int
    small_tp: int
    depth: int
    """Decoder layers after."""
    period: int
    """Every so-manieth of them has no positions, where any has none."""
    sequence: int
    small_sequence: int

    def length(self, tokens: int) -> int:
        """A number of tokens in proportion to the samples."""
        return max(1, tokens * self.small_sequence // self.sequence)


def small_model(sizes: AnyConfig, cut: Cut, padding: int, small_padding: int) -> AnyConfig:
    """The model with few features, heads, layers and token numbers.

    Arguments: the config of a family; what it is cut by; multiple (over tp) that the vocabulary is
    padded to, before and after.
    """
    heads, kv_heads = small_heads(sizes.num_attention_heads, sizes.kv_heads, cut.tp, cut.small_tp)
    scaling = _scaling(sizes.rope_scaling, cut)
    values: dict[str, Any] = {
        "num_hidden_layers": cut.depth,
        "num_attention_heads": heads,
        "vocab_size": small_vocabulary(
            sizes.vocab_size,
            (cut.tp, padding * cut.tp),
            (cut.small_tp, small_padding * cut.small_tp),
        ),
        "max_position_embeddings": _reach(sizes.max_position_embeddings, cut),
        "rope_scaling": scaling,
    }
    window = getattr(sizes, "sliding_window_size", None)
    if window is not None:
        values["sliding_window_size"] = _reach(window, cut)
    if isinstance(sizes, Starcoder2Config):
        width = min(_width(sizes, heads), sizes.hidden_size // sizes.num_attention_heads)
        values["hidden_size"] = heads * width
        values["global_attn_layers"] = small_layers(sizes.global_attn_layers, sizes, cut)
        if sizes.num_kv_heads is not None:
            values["num_kv_heads"] = kv_heads if sizes.grouped_query else sizes.num_kv_heads
    else:
        values |= _of_llama(sizes, heads, kv_heads, cut)
    if sizes.intermediate_size is not None:
        ratio = min(sizes.intermediate_size / sizes.hidden_size, WIDEST)
        each = max(1, round(ratio * values["hidden_size"] / cut.small_tp))
        values["intermediate_size"] = cut.small_tp * each
    return replace(sizes, **values)


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


def small_layers(layers: tuple[int, ...], sizes: AnyConfig, cut: Cut) -> tuple[int, ...]:
    """Layers that are unlike the others, in proportion: some stay, and not all."""
    depth = sizes.num_hidden_layers
    inside = sorted({i for i in layers if i < depth})
    if len(inside) == depth:
        return tuple(range(cut.depth))
    moved = sorted({i * cut.depth // depth for i in inside})
    return tuple(moved[: cut.depth - 1] if cut.depth > 1 else moved)


def _of_llama(sizes: LlamaConfig, heads: int, kv_heads: int, cut: Cut) -> dict[str, Any]:
    width = min(_width(sizes, heads), sizes.features_of_head)
    hidden, whole = heads * width, sizes.num_attention_heads * sizes.features_of_head
    if whole > sizes.hidden_size:
        hidden //= 2
    elif whole < sizes.hidden_size:
        hidden *= 2
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "head_dim": None if sizes.head_dim is None else width,
        "num_key_value_heads": None if sizes.num_key_value_heads is None else kv_heads,
    }
    if sizes.attn_implementation == "flash_attn":  # an order that no CPU can follow
        values["attn_implementation"] = "auto"
    if hasattr(sizes, "full_attention_layers"):
        values["full_attention_layers"] = small_layers(sizes.full_attention_layers, sizes, cut)
    if getattr(sizes, "no_rope_layer", None) is not None:
        values["no_rope_layer"] = cut.period
    return values


def _width(sizes: AnyConfig, heads: int) -> int:
    stretched = sizes.rope_scaling is not None
    return WIDE_HEAD_DIM if stretched or heads < MANY_HEADS else HEAD_DIM


def _reach(tokens: int, cut: Cut) -> int:
    """A window or a limit: what reaches over the whole sample goes on to do so."""
    return cut.length(tokens) if tokens < cut.sequence else max(cut.small_sequence, SEQUENCE)


def _scaling(scaling: RopeScaling | None, cut: Cut) -> RopeScaling | None:
    """Stretching around the shorter length: some waves stay, some grow."""
    if scaling is None:
        return None
    original = max(cut.length(scaling.original_max_position_embeddings), SHORTEST_ORIGINAL)
    original = min(original, scaling.original_max_position_embeddings)
    values: dict[str, Any] = {"original_max_position_embeddings": original}
    if scaling.rope_type == "yarn":  # bounds are turns over that length, of which there are few
        values["beta_fast"] = max(min(scaling.beta_fast, original / 8), 1.5 * scaling.beta_slow)
    return replace(scaling, **values)
