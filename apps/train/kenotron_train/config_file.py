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

DEFAULT_CONFIG = Path(__file__).with_name("default.yaml")
"""The training that runs when no file is given."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a training config from a YAML file; `!env` reads this process's environment.

    Args:
        path: the YAML file, in UTF-8.
        overrides: changes of single values; see `kenotron_config.load_config`.

    Returns:
        The checked config.

    Raises:
        ConfigError: there is no such file, or anything in it is wrong; names every problem.
    """
    return kenotron_config.load_config(path, overrides, environment=os.environ, warn=_warn)


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
