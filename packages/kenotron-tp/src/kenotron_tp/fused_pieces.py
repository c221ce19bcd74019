"""Matrices that are queries, keys and values in one: how their pieces lie, by the name of a style.

Shapes: I input features, O output features, H heads of P features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from kenotron_dist.placement import Chunk

HEAD_WIDTHS = ("head_dim", "head_size")
"""Attributes of attention that say P."""


def head_width(owner: nn.Module) -> int | None:
    """Return P as a module of attention says it; None: it does not."""
    return own_count(owner, HEAD_WIDTHS)


def own_count(owner: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first of some attributes that is a positive integer; None: none is."""
    found = (getattr(owner, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)


def _thirds(inputs: int, features: int, _: nn.Module) -> Sequence[Chunk] | str:
    if features != 3 * inputs:
        return f"out_features {features} is not three pieces as wide as in_features, {inputs}"
    return (Chunk(features // 3),) * 3


def _by_heads(inputs: int, features: int, _: nn.Module) -> Sequence[Chunk] | str:
    return (Chunk(features),)


def _multi_query(inputs: int, features: int, owner: nn.Module) -> Sequence[Chunk] | str:
    width = head_width(owner)
    if width is None or features <= 2 * width or features % width:
        return (
            f"{type(owner).__name__} gives {width} features of a head, and out_features {features} "
            "is not the queries of heads, one key and one value"
        )
    return (Chunk(features - 2 * width), Chunk(width, parts=1), Chunk(width, parts=1))


FUSED_STYLES: dict[str, Callable[[int, int, nn.Module], Sequence[Chunk] | str]] = {
    "qkv_colwise": _thirds,
    "heads_colwise": _by_heads,
    "multi_query_colwise": _multi_query,
}
"""By style: pieces of O, or why they cannot be cut so; asked for I, O and the layer's module.

``qkv_colwise``: all queries, all keys, all values (GPT-2, MPT). ``heads_colwise``: everything of a
head, or of a group of heads, lies together (BLOOM, Persimmon, Falcon). ``multi_query_colwise``:
the queries of all heads, then one key and one value, which every rank has (Falcon-7B, StarCoder).
"""
