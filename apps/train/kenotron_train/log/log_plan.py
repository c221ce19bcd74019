"""The part of a config that a run's log and its trackers follow from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kenotron_config import Config, LoggingConfig, Mask, dump_config, public


@dataclass(frozen=True, kw_only=True)
class LogPlan:
    """Names of a run, and what of it is written where."""

    folder: Path
    project: str
    run: str
    train_steps: int
    logging: LoggingConfig
    mask: Mask
    """Hides what the config has of the environment."""
    yaml: str
    """The config as trackers show it."""
    keys: dict[str, Any]
    """The same as JSON."""


def log_plan(config: Config) -> LogPlan:
    """Return what the log of a config's run follows from."""
    return LogPlan(
        folder=Path(config.checkpoints.checkpoints_path),
        project=config.general.project,
        run=config.general.run,
        train_steps=config.tokens.train_steps,
        logging=config.logging,
        mask=Mask(config),
        yaml=dump_config(config),
        keys=public(asdict(config)),
    )
