"""Numbers that no section can mean: longer than 64 bits, or too large for 32-bit floats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

LARGEST_INT = 2**64 - 1
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Of 32 bits, in which training computes."""


def number_problems(sections: Mapping[str, Any]) -> list[str]:
    """Name numbers that are too large to be computed with, whatever they are for.

    Args:
        sections: the sections of a config by name.

    Returns:
        One line for each: `key.path: value given; what is needed`.
    """
    found = []
    for path, value in _numbers("", sections):
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            found.append(f"{path}: {value} was given; it must have 64 bits at most")
        elif isinstance(value, float) and LARGEST_FLOAT < abs(value) < math.inf:
            found.append(f"{path}: {value} was given; it must be at most 3.4e38, as 32-bit floats")
    return found


@cache
def _names(section: type[Any]) -> tuple[str, ...]:
    """Return the fields of a dataclass."""
    return tuple(each.name for each in fields(section))


def _numbers(path: str, value: Any) -> Iterator[tuple[str, int | float]]:
    inner: list[tuple[object, Any]] = []
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
    elif is_dataclass(value):
        inner = [(name, getattr(value, name)) for name in _names(type(value))]
    elif isinstance(value, Mapping):
        inner = [*value.items()]
    elif isinstance(value, list | tuple):
        inner = [*enumerate(value)]
    for name, each in inner:
        yield from _numbers(f"{path}.{name}" if path else str(name), each)
