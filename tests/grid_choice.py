"""Which rows of the grid every run of the tests checks: as few as have all that is named here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import asdict, replace

import grid
from grid import Row
from grid_table import rows_of

CUTS = ("pp", "dp", "tp", "cp", "ep", "engine", "mode", "zero")
"""What says how a training is cut."""
Facts = frozenset[tuple[tuple[str, object], ...]]


@functools.cache
def chosen() -> tuple[Row, ...]:
    """Rows that have every setting, every two settings of ``CUTS``, and those of eight by hand.

    Of all rows of all sections, which have every two settings of any two axes.
    """
    rows = [row for section in grid.SECTIONS for row in rows_of(section)]
    known = {row: facts(row) for row in rows}
    kept = [*grid.HAND_PICKED, grid.DONE_WHEN]
    wanted = set().union(*known.values()).difference(*map(known.get, kept))
    while wanted:
        best = max(rows, key=lambda row: len(known[row] & wanted) / row.ranks)
        kept.append(best)
        wanted -= known[best]
    return tuple(row for row in rows if row in kept)


USES = {
    "cp": lambda row: row.cp > 1,
    "ep": lambda row: row.ep > 1 or "moe" in row.arch or row.arch == "deepseek",
    "pp": lambda row: row.sizes[0] > 1,
    "tp": lambda row: row.sizes[2] > 1,
}
"""Rows that use a package; all use the others."""


def touched(packages: Iterable[str]) -> tuple[Row, ...]:
    """The chosen rows that use one of these packages, named without ``kenotron-``."""
    uses = [USES.get(name) for name in packages]
    return tuple(row for row in chosen() if any(use is None or use(row) for use in uses))


def facts(row: Row) -> Facts:
    """Its settings and every two that cut it: an axis is cut or not, one micro-batch or more."""
    many = {"micro": min(row.micro, 2)} | {axis: min(size, 2) for axis, size in row.axes.items()}
    one = {"way": "none", "order": "none"} if row.cp == 1 else {}
    settings = asdict(replace(row, sizes=(1, 1, 1))) | many | one
    pairs = itertools.combinations([(name, settings[name]) for name in CUTS], 2)
    return frozenset([*((each,) for each in settings.items()), *pairs])
