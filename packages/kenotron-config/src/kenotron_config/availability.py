"""What a config asks for that cannot be run. It loads and is checked all the same."""

from __future__ import annotations

from kenotron_config.config import Config
from kenotron_config.lighteval_tasks import lighteval_problems


def unavailable(config: Config) -> list[str]:
    """Name all that a run of this config would need and there is not.

    Returns:
        One line for each, `key.path: what was given; rule; fix`; empty when it can be run.
    """
    return lighteval_problems(vars(config))


def check_available(config: Config) -> None:
    """Raise ValueError with all that ``unavailable`` names."""
    if problems := unavailable(config):
        raise ValueError("\n".join(problems))
