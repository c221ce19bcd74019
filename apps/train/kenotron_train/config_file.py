"""The config of a run from a file: the default one, the environment's variables, warnings."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import kenotron_config
from kenotron_config import Config, Mask
from kenotron_dist import resolve
from kenotron_dist.launch import launcher


def load_config(
    path: str | Path, overrides: Iterable[str] = (), ranks: int | None = None
) -> Config:
    """Read a training config from a YAML file; `!env` reads this process's environment.

    Args:
        path: the YAML file, in UTF-8.
        overrides: changes of single values; see `kenotron_config.load_config`.
        ranks: processes of a run without a launcher, which `parallelism.dp: auto` follows; under
            one those that it has started.

    Returns:
        The checked config.

    Raises:
        ConfigError: there is no such file, or anything in it is wrong; names every problem.
    """
    with contextlib.suppress(ValueError):  # which is reported where ranks meet
        ranks = resolve(os.environ).world_size if launcher() != "none" else ranks
    return kenotron_config.load_config(
        path, overrides, environment=os.environ, world=ranks, warn=_warn
    )


def parse_config(
    text: str, source_name: str, overrides: Iterable[str] = (), *, saved: bool = False
) -> Config:
    """Read a training config from the text of a YAML file, as `load_config` does.

    Args:
        text: the YAML.
        source_name: what problems call the text, for instance the file's path.
        overrides: changes of single values; see `kenotron_config.load_config`.
        saved: the text is that of a checkpoint; see `kenotron_config.parse_config`.

    Returns:
        The checked config.

    Raises:
        ConfigError: anything is wrong; names every problem.
    """
    return kenotron_config.parse_config(
        text, source_name, overrides, saved=saved, environment=os.environ, warn=_warn
    )


def _warn(text: str) -> None:
    """Print a warning once for all ranks that a launcher started."""
    with contextlib.suppress(ValueError):
        if resolve(os.environ).rank == 0:
            print(f"Warning: {Mask().line(text)}", file=sys.stderr)
