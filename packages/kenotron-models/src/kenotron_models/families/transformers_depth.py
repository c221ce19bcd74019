"""Fewer layers of a config.json of transformers: each kind of layer stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

COUNT = re.compile(r"(num_|n_)?(hidden_|decoder_)?(layers|layer|blocks)")
"""Keys of the number of layers."""
OTHER_LISTS = ("token_id", "multipliers", "label", "suppress")
"""Lists, by a part of their key, that are not of layers, whatever their length."""
NUMBERS = ("layer", "idx")
"""Parts of the keys of lists of layers' numbers."""
FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "num_hash_layers")
"""Counts of first layers that are unlike the others."""
LAST = ("num_kv_shared_layers",)
"""Counts of last layers that are."""
ENDS = ("moe_layer_end_index", "max_window_layers")
"""Numbers of a layer at, or near, the end."""
SHARES = ("n_layers_per_attn_res_block", "loop_layer_index_start", "loop_layer_index_end")
"""Numbers that are shares of the depth."""
PERIODS = {
    "decoder_sparse_step": None, "moe_layer_freq": None, "moe_layer_frequency": None,
    "interleave_moe_layer_step": None, "global_attn_every_n_layers": None,
    "sliding_window_pattern": None, "_sliding_window_pattern": None,
    "full_attention_interval": None, "no_rope_layer_interval": None, "layer_group_size": None,
    "rescale_every": None, "global_attn_every_n": None,
    "attn_layer_period": "attn_layer_offset", "expert_layer_period": "expert_layer_offset",
}  # fmt: skip
"""Every so-many-th layer is unlike the others, and the key that says which of them."""


def chosen_layers(values: Mapping[str, Any], depth: int, wanted: int) -> list[int]:
    """Return layers (from 0) that stay, in order: each kind is among them where there is room.

    Args:
        values: of the config.json.
        depth: its layers.
        wanted: how many stay; a multiple where there are more kinds.
    """
    lists = {k: v for k, v in values.items() if _of_layers(k, v, depth)}
    numbers = {k: {*v} for k, v in values.items() if k not in lists and _numbers(k, v, depth)}
    firsts = [values[key] for key in FIRST if isinstance(values.get(key), int)]
    lasts = [depth - values[key] for key in LAST if isinstance(values.get(key), int)]
    special = {int(i) for i in values.get("per_layer_config") or {}}
    of_kind: dict[str, list[int]] = {}
    for i in range(depth):
        marks = [each[i] for each in lists.values()] + [i in each for each in numbers.values()]
        marks += [i < count for count in firsts + lasts] + [i in special]
        of_kind.setdefault(repr(marks), []).append(i)
    kinds = [*of_kind.values()]
    count = next((n for n in range(wanted, depth + 1, wanted) if n >= len(kinds)), wanted)
    # The first of each kind, then the second, which may share weights with it; then any.
    kept = [each[0] for each in kinds] + [each[1] for each in kinds if len(each) > 1]
    kept = kept[: min(count, depth)]
    rest = [i for i in range(depth) if i not in kept]
    missing = min(count, depth) - len(kept)
    kept += [rest[k * len(rest) // missing] for k in range(missing)]
    return sorted(kept)


def fewer_layers(values: Mapping[str, Any], depth: int, kept: list[int]) -> dict[str, Any]:
    """Return the keys that name layers, for those that stay."""
    count, found = len(kept), dict[str, Any]()
    for key, value in values.items():
        if _of_layers(key, value, depth):
            found[key] = [value[i] for i in kept]
        elif _numbers(key, value, depth):
            found[key] = [new for new, old in enumerate(kept) if old in value]
        elif key == "per_layer_config" and value:
            given = {int(i): each for i, each in value.items()}
            found[key] = {f"{new:02d}": given[i] for new, i in enumerate(kept) if i in given}
        elif key == "attention_types":  # GPT-Neo: kinds, and how often they come
            kinds = [kind for group, times in value for kind in group * times]
            found[key] = [[[kinds[i] for i in kept], 1]]
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif key in FIRST:
            found[key] = sum(i < value for i in kept)
        elif key in LAST:
            found[key] = sum(i >= depth - value for i in kept)
        elif key in ENDS:
            found[key] = count - 1 if value == depth - 1 else min(value, count)
        elif key in SHARES:
            found[key] = max(1, value * count // depth)
        elif COUNT.fullmatch(key) and value > 0 and depth % value == 0:  # LongCat's are pairs
            found[key] = max(1, value * count // depth)
        elif key in PERIODS and value > count:
            found[key] = max(2, count - (value - count) % 2)  # other kinds are often the odd ones
            offset = PERIODS[key]
            if offset is not None and values.get(offset, 0) >= found[key]:
                found[offset] = found[key] - 2 + values[offset] % 2
    return found


def _of_layers(key: str, value: Any, depth: int) -> bool:
    listed = isinstance(value, list) and len(value) == depth and not _numbers(key, value, depth)
    return listed and key != "attention_types" and not any(part in key for part in OTHER_LISTS)


def _numbers(key: str, value: Any, depth: int) -> bool:
    """Return True for a list of layers' numbers."""
    return (
        isinstance(value, list)
        and any(part in key for part in NUMBERS)
        and all(type(i) is int and 0 <= i < depth for i in value)
        and len({*value}) == len(value)
    )
