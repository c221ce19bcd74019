"""Rotary positions in a config.json of Hugging Face: both spellings, and what we make of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kenotron_models.rope import Rope
from kenotron_models.rope_scaling import RopeScaling

SLIDING, FULL = "sliding_attention", "full_attention"
"""Types of layers, with a window and without."""
LINEAR = "linear_attention"
"""The type of layers with a state in place of keys and values."""
THETA = 10000.0
"""The base where a config.json says none."""
_OWN = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings",
        "truncate",
    ),
}  # fmt: skip
"""Fields that each kind reads, under the same names as ours."""
_KIND = ("rope_type", "type", "rope_theta")
_READ = {*_KIND, "partial_rotary_factor", "mscale", "mscale_all_dim"}


def rope_from_hf(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and stretching, from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``.

    ``share_from_hf`` reads the share of features that turn. Raises ValueError, naming the key, for
    kinds and values that cannot be computed here.
    """
    where, given = _mapping(values)
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ValueError(f"{where}: {given!r} was given; one mapping for all layers is needed")
    theta = given.get("rope_theta") or values.get("rope_theta") or THETA
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind not in _OWN:
        raise ValueError(
            f"{where}.rope_type: {kind!r} was given; it must be one of default, {', '.join(_OWN)}"
        )
    own = {name: given[name] for name in _OWN[kind] if given.get(name) is not None}
    if "factor" not in own:
        raise ValueError(f"{where}.factor: nothing was given; {kind} needs a number")
    if "original_max_position_embeddings" in _OWN[kind]:
        own.setdefault("original_max_position_embeddings", _first_length(values))
    if kind == "yarn":
        own |= _scores(given, float(own["factor"]))
    unknown = [
        name
        for name, value in given.items()
        if value is not None
        and name not in {*_READ, *(n for names in _OWN.values() for n in names)}
    ]
    if unknown:
        raise ValueError(f"{where}.{unknown[0]}: {given[unknown[0]]!r} was given; {kind} has none")
    return float(theta), RopeScaling(rope_type=kind, **own)


def share_from_hf(values: Mapping[str, Any]) -> float:
    """Share of a head's features that turn, from either spelling; 1 where nothing is said."""
    given = _mapping(values)[1]
    inner = given.get("partial_rotary_factor") if isinstance(given, Mapping) else None
    return float(inner or values.get("partial_rotary_factor") or 1.0)


def check_whole_heads(values: Mapping[str, Any]) -> None:
    """Raise ValueError where positions turn a part of a head's features."""
    if (share := share_from_hf(values)) != 1:
        raise ValueError(
            f"partial_rotary_factor: {share} was given; whole heads are turned in this family, "
            "so it must be 1"
        )


def ropes_by_type(values: Mapping[str, Any], full: float, sliding: float) -> dict[str, Any]:
    """Keys of a config.json that has rotary positions for each type of layer, as others have them.

    Those of full layers become ``rope_parameters``, the base of sliding ones
    ``rope_local_base_freq``.

    Args:
        values: all keys, in either spelling.
        full: the base of full layers where nothing is said.
        sliding: that of sliding layers.

    Raises:
        ValueError: one mapping for all layers, or sliding layers whose positions are stretched.
    """
    given = values.get("rope_parameters") or {}
    if given and not {*given} <= {FULL, SLIDING}:
        raise ValueError(
            f"rope_parameters: {given!r} was given; it must be a mapping with {FULL} and {SLIDING}"
        )
    own, local = dict(given.get(FULL) or {}), given.get(SLIDING) or {}
    own |= values.get("rope_scaling") or {}
    kind = local.get("rope_type") or "default"
    if kind != "default":
        raise ValueError(
            f"rope_parameters.{SLIDING}.rope_type: {kind!r} was given; positions of sliding layers "
            "are not stretched here, so it must be 'default'"
        )
    own.setdefault("rope_theta", values.get("rope_theta") or full)
    base = local.get("rope_theta") or values.get("rope_local_base_freq") or sliding
    known = {**values, "rope_parameters": own, "rope_local_base_freq": float(base)}
    return known | {"rope_scaling": None}


def _mapping(values: Mapping[str, Any]) -> tuple[str, Any]:
    """Key of the mapping of rotary positions, and what it is; the old key wins in transformers."""
    where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    return where, values.get(where) or {}


def rope_to_hf(rope: Rope | None) -> dict[str, Any]:
    """The keys of both spellings: readers of either find theirs."""
    scaling, theta = (None, None) if rope is None else (rope.scaling, rope.theta)
    own: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        found = {name: getattr(scaling, name) for name in _OWN[scaling.rope_type]}
        own = {"rope_type": scaling.rope_type}
        own |= {name: value for name, value in found.items() if value is not None}
        if own.get("truncate") is True:  # what all readers take for granted
            del own["truncate"]
    part = {} if rope is None or rope.share == 1 else {"partial_rotary_factor": rope.share}
    return {
        "rope_parameters": {"rope_theta": theta, **own, **part},
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else own,
        **part,
    }


def _first_length(values: Mapping[str, Any]) -> Any:
    """Longest text of the first training, where the mapping itself does not say."""
    return values.get("original_max_position_embeddings") or values["max_position_embeddings"]


def _scores(given: Mapping[str, Any], factor: float) -> dict[str, float]:
    """The factor of queries and keys where two shares of its logarithm say it (DeepSeek)."""
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if given.get("attention_factor") is not None or not above or not below:
        return {}
    log = 0.1 * math.log(factor) if factor > 1 else 0.0
    return {"attention_factor": (above * log + 1.0) / (below * log + 1.0)}
