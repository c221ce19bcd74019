"""Fields that say what the weights of a model mean, and in which two models differ."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.spec import DecoderSpec

OF_THE_RUN = (
    "backend", "separate_documents", "z_loss", "balance_loss", "balance", "layers", "bias_rate",
    "jitter", "capacity_factor", "way", "chunk", "stage_starts", "mtp_weight", "steps",
    "step_scale", "step_init",
)  # fmt: skip
"""Fields of a spec that do not say what the weights mean: config.json may have no word for them."""


def differences(
    ours: DecoderSpec, theirs: DecoderSpec, but: Collection[str] = ("interleaved",)
) -> list[str]:
    """Name the fields that say what weights mean, and in which two models differ.

    Args:
        ours: a model.
        theirs: another.
        but: fields that do not count; rows of tensors can make up for interleaved positions.

    Returns:
        A line for each: ``name: a and b``. Where all blocks differ in the same way the name is that
        in a block (``attention.window``), else that of the first that does (``layers.1...``).
    """
    free, depths = {*OF_THE_RUN, *but}, (ours.num_hidden_layers, theirs.num_hidden_layers)
    outside = [_line("num_hidden_layers", depths)] if depths[0] != depths[1] else []
    outside += [
        _line(name, pair) for name, pair in _changed(ours, theirs, free | {"blocks"}).items()
    ]
    by_name: dict[str, dict[int, tuple[Any, Any]]] = {}
    for i, (a, b) in enumerate(zip(ours.blocks, theirs.blocks, strict=False)):
        for name, pair in _changed(a, b, free).items():
            by_name.setdefault(name, {})[i] = pair
    for name, pairs in by_name.items():
        first, pair = next(iter(pairs.items()))
        equal = len(pairs) == min(depths) and all(each == pair for each in pairs.values())
        outside.append(_line(name if equal else f"layers.{first}.{name}", pair))
    return list(dict.fromkeys(outside))


def _line(name: str, pair: tuple[Any, Any]) -> str:
    return f"{name}: {_said(pair[0])} and {_said(pair[1])}"


def _changed(ours: Any, theirs: Any, free: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, by the path of names that lead to them; parts by their own names."""
    found: dict[str, tuple[Any, Any]] = {}
    for each in fields(ours):
        a, b = getattr(ours, each.name), getattr(theirs, each.name)
        if each.name in free or a == b:
            continue
        if type(a) is type(b) and is_dataclass(a) and not isinstance(a, RopeScaling):
            name = getattr(a, "name", each.name)
            found |= {f"{name}.{inner}": p for inner, p in _changed(a, b, free).items()}
        else:
            found[each.name] = _kind(a), _kind(b)
    return found


def _kind(value: Any) -> Any:
    """A value, or the name of a part of a block."""
    return getattr(value, "name", value)


def _said(value: Any) -> str:
    """A value as YAML has it where it is nothing, or has keys."""
    if not is_dataclass(value):
        return "null" if value is None else repr(value)
    known = {each.name: getattr(value, each.name) for each in fields(value)}
    return (
        "{" + ", ".join(f"{key}: {said}" for key, said in known.items() if said is not None) + "}"
    )
