"""Requests of a config next to its training that cannot be met, and are left out."""

from __future__ import annotations

from kenotron_config.config import Config
from kenotron_config.lighteval_tasks import lighteval_problems


def unavailable(config: Config) -> list[str]:
    """Name the evaluations that a config asks for and that cannot be made.

    A training is made without them. Only a command that evaluates refuses them.

    Returns:
        One line for each, `key.path: what was given; rule; fix`; empty if there are none.
    """
    return lighteval_problems(vars(config))
