"""Places in a decoder's spec (``attention.heads``), by which keys and specs say the same.

A place is a path of attributes from a part of a block (by its name), from ``block``, the first
block, or from the spec itself.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kenotron_models.families.keys import KeyTable, key_table
from kenotron_models.family import FamilyConfig
from kenotron_models.spec import DecoderSpec

PARTS = ("attention", "mamba", "mamba2", "gated_delta", "mlp", "experts")
MISSING = object()
"""Stands for the value of a place that a spec does not have."""
CUT = {
    "attention.heads": "num_attention_heads",
    "mamba.channels": "channels",
    "mamba2.heads": "num_heads",
    "gated_delta.key_heads": "key_heads",
    "mlp.features": "intermediate_size",
    "experts.shared_features": "n_shared_experts * moe_intermediate_size",
}
"""Places of sizes that tp cuts, and their names where a config has no key for them."""


def in_spec(spec: DecoderSpec, *places: str) -> Any:
    """Return the value at the first of these places that a spec has, or MISSING."""
    for place in places:
        first, *path = place.split(".")
        owner: Any = spec
        if first == "block":
            owner = spec.blocks[0]
        elif first in PARTS:
            parts = (part for block in spec.blocks for part in block.parts)
            owner = next((part for part in parts if part.name == first), MISSING)
        else:
            path = [first, *path]
        for name in path:
            owner = getattr(owner, name, MISSING)
        if owner is not MISSING:
            return owner
    return MISSING


def name_at(kind: type[Any], place: str) -> str | None:
    """Return the key of a config class that says a place; one that names it first is preferred."""
    found: dict[bool, str] = {}
    for name, each in key_table(kind).items():
        if place in each.at:
            found.setdefault(each.at[0] == place, name)
    return found.get(True, found.get(False))


def placed(config: KeyTable, owner: str) -> dict[str, Any]:
    """Return the keys of a config that say attributes of a part, by the names that these have.

    Values that config.json has in another form (``Key.write``), and null ones, are left out. Of two
    keys for one attribute that one counts which names it first.

    Args:
        config: keys of a family.
        owner: place of the part: ``mamba2``, ``experts.router``.
    """
    first, further = dict[str, Any](), dict[str, Any]()
    for name, each in key_table(type(config)).items():
        value = getattr(config, name)
        for place in each.at:
            where, _, attribute = place.rpartition(".")
            if where == owner and value is not None and each.write is None:
                (first if place == each.at[0] else further)[attribute] = value
    return further | first


def cut_sizes(config: FamilyConfig) -> dict[str, int]:
    """Return the sizes that tp cuts, by key: heads, channels, and feed-forwards of all tokens."""
    found, spec = {}, config.decoder
    for place, name in CUT.items():
        size = in_spec(spec, place)
        if size is not MISSING and size:
            found[_key_of(config, place) or name] = size
    return found


def _key_of(config: FamilyConfig, place: str) -> str | None:
    """The key of a place, also one of a section of the config."""
    own = type(config)
    if place in (products := getattr(own, "products", {})):
        return products[place]
    if (name := name_at(own, place)) is not None:
        return name
    for each in fields(own):
        section = getattr(config, each.name)
        if isinstance(section, KeyTable) and (name := name_at(type(section), place)):
            return f"{each.name}.{name}"
    return None
