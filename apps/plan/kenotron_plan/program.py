"""The program: its name, its lines, and the configs that it reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import kenotron_config
from kenotron_command import called
from kenotron_command import fail as command_fail
from kenotron_config import Config, masked

COMMAND = "kenotron-plan"
"""Its own script, and its distribution."""


def program() -> str:
    """Return the command that started this process: ``kenotron plan``, ``python apps/plan``."""
    return called("python apps/plan", name=COMMAND)


def say(text: str) -> None:
    """Print lines; credentials in URLs are masked."""
    print(masked(text), flush=True)


def fail(text: str, status: int) -> int:
    """Report an error as ``say`` prints. Returns the exit status."""
    return command_fail(masked(text), status)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read the config of a training; its warnings go to standard error.

    Args:
        path: the YAML file; ``!env`` in it reads this process's environment.
        overrides: changes of single values; see ``kenotron_config.load_config``.

    Raises:
        ConfigError: there is no such file, or anything in it is wrong.
    """
    return kenotron_config.load_config(path, overrides, environment=os.environ, warn=_warn)


def _warn(text: str) -> None:
    print(f"Warning: {masked(text)}", file=sys.stderr)
