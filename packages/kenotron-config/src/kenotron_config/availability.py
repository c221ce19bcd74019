"""What a config asks for that cannot be run yet. It loads and is checked all the same."""

from __future__ import annotations

from collections.abc import Iterator

from kenotron_config.config import Config
from kenotron_config.eval_sections import DoReMiConfig
from kenotron_config.lighteval_tasks import lighteval_problems

NOT_YET: tuple[type, ...] = (DoReMiConfig,)
"""Sections that load and that no run can use."""


def unavailable(config: Config) -> list[str]:
    """Name all that a run of this config would need and there is not.

    Returns:
        One line for each, `key.path: what was given; what to do`; empty when it can be run.
    """
    lines = [
        f"{path}: {what} not available yet; {advice}" for path, what, advice in _sections(config)
    ]
    return [*lines, *lighteval_problems(vars(config))]


def check_available(config: Config) -> None:
    """Raise ValueError with all that ``unavailable`` names."""
    if problems := unavailable(config):
        raise ValueError("\n".join(problems))


_Lines = Iterator[tuple[str, str, str]]


def _sections(config: Config) -> _Lines:
    for name, what in (("doremi", "learned weights of domains are"),):
        if isinstance(getattr(config, name), NOT_YET):
            yield name, what, "remove the section"
