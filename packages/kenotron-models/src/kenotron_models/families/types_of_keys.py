"""Type of a key's value against the hint of its field: config.json may hold anything."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_UNIONS = (types.UnionType, Union)


def fits(value: object, hint: Any) -> bool:
    """Return True where a value is of the type that a hint of a config's field names."""
    kind, of = get_origin(hint), get_args(hint)
    if kind in _UNIONS:
        return any(fits(value, each) for each in of)
    if kind is Literal:
        return isinstance(value, str) and value in of
    if kind is tuple:
        return isinstance(value, tuple | list) and all(fits(each, of[0]) for each in value)
    if hint is bool:
        return isinstance(value, bool) or value in (0, 1)
    if hint in (int, float):
        return isinstance(value, hint | int) and not isinstance(value, bool)
    return isinstance(value, hint)


def words_of(hint: Any) -> str:
    """Return in words what a hint asks for; null is left out."""
    kind, of = get_origin(hint), get_args(hint)
    if kind in _UNIONS:
        return " or ".join(words_of(each) for each in of if each is not type(None))
    if kind is Literal:
        return f"one of {', '.join(map(str, of))}"
    if kind is tuple:
        return f"a list, each of it {words_of(of[0])}"
    return _WORDS.get(hint, "a mapping")
