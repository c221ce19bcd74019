"""Which parameters an optimizer treats alike, from plain rules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterGroup:
    """Logical tensors with the same options."""

    names: tuple[str, ...]
    weight_decay: float


def decay_groups(
    names: Iterable[str], weight_decay: float, exclude: Sequence[str] = ()
) -> list[ParameterGroup]:
    """Two groups: with weight decay, and without for names that match an ``exclude`` pattern.

    A pattern is a regular expression for a whole name. Empty groups are left out. Raises ValueError
    for a pattern that no name matches.
    """
    names = list(names)
    for pattern in exclude:
        if not any(re.fullmatch(pattern, name) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ValueError(
                f"no parameter is named by {pattern!r}, which shall have no weight decay: a "
                f"pattern must match a whole name, such as {near[0] if near else '(none)'!r}"
            )
    patterns = [re.compile(pattern) for pattern in exclude]
    kept, free = [], []
    for name in names:
        matched = any(pattern.fullmatch(name) for pattern in patterns)
        (free if matched else kept).append(name)
    groups = (ParameterGroup(tuple(kept), weight_decay), ParameterGroup(tuple(free), 0.0))
    return [group for group in groups if group.names]
