"""Ranks in words."""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN = 8
"""So many are listed one by one."""


def listed(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2``; of many the first eight and the last, and how many there are."""
    found = sorted(ranks)
    shown = ", ".join(map(str, found[:_SHOWN]))
    more = f", ... {found[-1]}: {len(found)} in all" if len(found) > _SHOWN else ""
    return f"rank{'' if len(found) == 1 else 's'} {shown}{more}"
