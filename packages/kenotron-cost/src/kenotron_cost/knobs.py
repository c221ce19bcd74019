"""Keys that a search changes only where it is asked for: some of them change numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from kenotron_config import Config

Knobs = tuple[tuple[str, object], ...]
"""Keys of a config and their values."""
SEARCH_KEYS = {
    "dtype": ("model.dtype", ("bfloat16", "float32")),
    "accumulate": ("optimizer.accumulate_grad_in_fp32", (True, False)),
    "offload": ("optimizer.offload", (False, True)),
    "compile": ("model.compile", (True,)),
    "shard_ranks": ("optimizer.shard_ranks", (None,)),
}
"""By the name that ``--search`` takes; ``shard_ranks`` is also a node's ranks."""
SEARCH_REMARKS = {
    "dtype": "model.dtype changes the numbers; products of both are timed at the machine's rate",
    "accumulate": "optimizer.accumulate_grad_in_fp32 changes the numbers",
    "compile": "all layouts have model.compile: true, whose effect on time and memory is not known",
}
"""Warnings of what a search of a key does not say."""


def search_names(text: str) -> tuple[str, ...]:
    """Return the names of ``--search``. Raises ValueError for one that is not known."""
    return check_names(tuple(dict.fromkeys(each.strip() for each in text.split(","))))


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of ``SEARCH_KEYS``. Raises ValueError for one that is not known."""
    if unknown := [each for each in names if each not in SEARCH_KEYS]:
        raise ValueError(f"--search {unknown[0]}: give some of {', '.join(SEARCH_KEYS)}")
    return tuple(names)


def knobs_of(names: Sequence[str], dp: int, ranks: int) -> list[Knobs]:
    """Return all values of some keys for a layout.

    Args:
        names: of ``SEARCH_KEYS``.
        dp: of the layout.
        ranks: of dp on a node.
    """
    found = []
    for name in names:
        key, values = SEARCH_KEYS[name]
        if name == "shard_ranks" and 1 < ranks < dp and dp % ranks == 0:
            values = (None, ranks)
        found.append([(key, value) for value in values])
    return [*product(*found)]


def check_search(config: Config, names: Sequence[str]) -> None:
    """Raise ValueError for a key of which a config allows no value that a search tries."""
    for name in check_names(names):
        key, values = SEARCH_KEYS[name]
        refused = []
        for value in values:
            try:
                with_knobs(config, ((key, value),))
            except ValueError as error:
                refused.append(str(error))
        if len(refused) == len(values):
            raise ValueError(
                f"--search {name}: leave it out: no value that it tries is legal. {refused[0]}"
            )


def with_knobs(config: Config, knobs: Knobs) -> Config:
    """Return a config with other values of keys. Raises ValueError where it is not legal."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in knobs:
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: replace(getattr(config, name), **more) for name, more in sections.items()}
    return replace(config, **changed) if changed else config
