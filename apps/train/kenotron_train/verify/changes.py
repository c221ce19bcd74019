"""Keys in which a config and its small copy differ, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kenotron_config import Config
from kenotron_models.families import TransformersConfig

MOST_SHOWN = 12
"""Values of a list that are shown."""
COMPARED = ("parallelism", "model", "tokens", "optimizer")
"""Sections whose changes are reported."""


def changes(config: Config, small: Config) -> list[tuple[str, str, str]]:
    """List the differences between a config and its small copy: (key path, before, after)."""
    found = []
    for section in COMPARED:
        before, after = (dict(_leaves(section, _plain(each, section))) for each in (config, small))
        for path in {**before, **after}:
            old, new = before.get(path), after.get(path)
            if old != new:
                found.append((path, _shown(old), _shown(new)))
    return found


def _plain(config: Config, section: str) -> dict[str, Any]:
    """Return a section as mappings, with all keys of a config.json of transformers."""
    values: dict[str, Any] = asdict(getattr(config, section))
    sizes = config.model.model_config
    if section == "model" and isinstance(sizes, TransformersConfig):
        values["model_config"] |= sizes.keys
        del values["model_config"]["config_json"]
    return values


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(f"{path}.{name}", item)
    else:
        yield path, value


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple | list):
        if len(value) > MOST_SHOWN:
            return f"{len(value)} values"
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, dict):
        return " ".join(map(_shown, value.values()))
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return str(value)
