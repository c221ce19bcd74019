"""What a config asks for that cannot be run yet. It loads and is checked all the same."""

from __future__ import annotations

from collections.abc import Iterator

from kenotron_config.config import Config
from kenotron_config.eval_sections import LightEvalConfig
from kenotron_config.sections import ParallelismConfig

NOT_YET: tuple[type, ...] = (LightEvalConfig,)
"""Sections that load and that no run can use."""


def unavailable(config: Config) -> list[str]:
    """Name all that a run of this config would need and there is not.

    Returns:
        One line for each, `key.path: what was given; what to do`; empty when it can be run.
    """
    found = [*_parallelism(config.parallelism), *_sections(config)]
    return [f"{path}: {what} not available yet; {advice}" for path, what, advice in found]


def check_available(config: Config) -> None:
    """Raise ValueError with all that ``unavailable`` names."""
    if problems := unavailable(config):
        raise ValueError("\n".join(problems))


_Lines = Iterator[tuple[str, str, str]]


def _parallelism(section: ParallelismConfig) -> _Lines:
    if section.moe_layer_recompute:
        yield "parallelism.moe_layer_recompute", "true was given; that is", "set it to false"


def _sections(config: Config) -> _Lines:
    for name, what in (("lighteval", "evaluations are"),):
        if isinstance(getattr(config, name), NOT_YET):
            yield name, what, "remove the section"
