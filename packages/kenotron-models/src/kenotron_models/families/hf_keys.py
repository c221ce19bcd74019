"""A config.json of Hugging Face from a table of keys, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kenotron_models.families.keys import OF_CONFIG, Key, key_table, nullable
from kenotron_models.families.places import MISSING, in_spec
from kenotron_models.family import FamilyConfig, HuggingFace, Values
from kenotron_models.spec import DecoderSpec


def table_defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the keys of config.json that a table has, with its defaults; not those needed."""
    own = kind.__dataclass_fields__
    return {
        each.hf: own[name].default
        for name, each in key_table(kind).items()
        if each.hf and not each.needed
    }


def allowed_values(kind: type[Any], hf: HuggingFace) -> dict[str, tuple[Any, ...]]:
    """Return the keys of a config.json that may have a few values only, and these."""
    known = {each.hf: each.only for each in key_table(kind).values() if each.hf and each.only}
    dropout = {} if _reads(kind, "attention_dropout") else {"attention_dropout": (0, None)}
    return {**known, **dropout, **{name: (*allowed,) for name, allowed in hf.only.items()}}


def keys_from_hf(kind: type[Any], values: Values) -> dict[str, Any]:
    """Return the keys of a config class that a config.json has, defaults filled in.

    Raises:
        ValueError: a line for each number that is not whole.
    """
    table = {name: each for name, each in key_table(kind).items() if each.hf}
    wrong = [
        f"{each.hf}: {values.get(each.hf)!r} was given; it must be a whole number from {each.least}"
        for name, each in table.items()
        if each.least is not None and not _is_whole(kind, name, each, values.get(each.hf))
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    own = {name: _ours(kind, name, each, values[each.hf]) for name, each in table.items()}
    return {**own, **kind.read_hf(values)}


def read_config(kind: type[Any], values: Values) -> FamilyConfig:
    """Return the config that a config.json describes. Raises ValueError, naming the key."""
    config: FamilyConfig = kind(**keys_from_hf(kind, values))
    return config


def keys_to_hf(kind: type[Any], hf: HuggingFace, config: FamilyConfig) -> dict[str, Any]:
    """Return the keys of a config.json of a family for the config of any family.

    Parts that the model lacks leave their keys out: they have the defaults of theirs.

    Args:
        kind: config class of the family that is written.
        hf: its names.
        config: the model; what its ``decoder`` says is written.

    Raises:
        ValueError: the family has no such parts.
    """
    spec = config.decoder
    recorded = {
        each.hf: getattr(config, name, kind.__dataclass_fields__[name].default)
        for name, each in key_table(kind).items()
        if each.hf and each.at == (OF_CONFIG,)
    }
    first = {"architectures": [hf.architecture], "model_type": hf.model_type, "use_cache": True}
    own = {} if hf.write is None else hf.write(spec)
    found = {**first, **recorded, **part_to_hf(kind, spec), **own}
    return {name: value for name, value in found.items() if value is not MISSING}


def part_to_hf(kind: type[Any], spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys of a config.json whose values a spec has; see ``keys_to_hf``."""
    found = {}
    for each in key_table(kind).values():
        if each.hf and (value := in_spec(spec, *each.at)) is not MISSING:
            found[each.hf] = value if each.write is None else each.write(value)
    return {**found, **kind.write_hf(spec)}


def first_of(ends: Any) -> Any:
    """Return a token number; of several ends the first."""
    return ends[0] if isinstance(ends, list | tuple) and ends else ends


def _reads(kind: type[Any], name: str) -> bool:
    return any(each.hf == name for each in key_table(kind).values())


def _is_whole(kind: type[Any], name: str, each: Key, value: Any) -> bool:
    if each.read is not None or (value is None and not each.needed and name in nullable(kind)):
        return True
    return type(value) is int and (not each.needed or value >= (each.least or 0))


def _ours(kind: type[Any], name: str, each: Key, value: Any) -> Any:
    """The value of our key; null is false, or the default, where ours cannot be null."""
    if each.read is not None:
        return each.read(value)
    usual = kind.__dataclass_fields__[name].default
    if value is None and isinstance(usual, int | float) and name not in nullable(kind):
        return False if isinstance(usual, bool) else usual
    if isinstance(value, list):
        return tuple(value)
    return float(value) if isinstance(usual, float) and isinstance(value, int) else value


def without_rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys without those of rotary positions, for a model that has no positions."""
    return {key: value for key, value in keys.items() if not key.startswith("rope")}
