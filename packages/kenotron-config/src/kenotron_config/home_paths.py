"""`~` at the begin of a path: the home of the user who starts the run."""

from collections.abc import Callable, Mapping
from typing import Any

HOME = "HOME"
"""The variable with the folder."""
OTHERS = "lighteval.slurm"
"""Nanotron's jobs of evaluations: no path of theirs is used."""


def expand_home(
    data: Any,
    environment: Mapping[str, str],
    report: Callable[[str, str], None],
    path: str = "",
) -> Any:
    """Return a config's values with `~` and `~/...` as paths from home, in mappings' keys, too.

    No other value of a config begins so. Values of `!env` stay as they are: a config is written
    with their tag.

    Args:
        data: the values, nested.
        environment: has `HOME`.
        report: called with the dotted path and a sentence where it has not.
        path: dotted path of `data`.
    """
    if path == OTHERS:
        return data
    if isinstance(data, dict):
        return {
            expand_home(key, environment, report, f"{path}.{key}".strip(".")): expand_home(
                value, environment, report, f"{path}.{key}".strip(".")
            )
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [expand_home(each, environment, report, path) for each in data]
    if type(data) is not str or not (data == "~" or data.startswith("~/")):
        return data
    home = environment.get(HOME, "")
    if not home:
        report(path, f"{data!r} was given, and {HOME} is not set: write the folder in full")
    return home.rstrip("/") + data[1:]
