"""References to code in the JSON files of a model folder: they are not carried along."""

from __future__ import annotations

from typing import Any

AUTO_MAP = "auto_map"
"""The key that names Python code of a folder, which transformers may be asked to run."""


def without_code(values: Any) -> Any:
    """Return JSON values without the key ``auto_map``, at any depth."""
    if isinstance(values, dict):
        return {key: without_code(value) for key, value in values.items() if key != AUTO_MAP}
    if isinstance(values, list):
        return [without_code(value) for value in values]
    return values
