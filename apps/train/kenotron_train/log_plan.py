"""The part of a config that a run's log and its trackers follow from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron_config import (
    GeneralConfig,
    LoggingConfig,
    Mask,
    MetricsLoggingConfig,
    ProfilerConfig,
)


@dataclass(frozen=True, kw_only=True)
class LogPlan:
    """Names of a run, and what of it is written where."""

    folder: Path
    general: GeneralConfig
    train_steps: int
    logging: LoggingConfig
    profiler: ProfilerConfig | None
    layers: MetricsLoggingConfig | None
    """Figures of every layer; None: there are none."""
    mask: Mask
    """Hides what the config has of the environment."""
    yaml: str
    """The config as trackers show it."""
    keys: dict[str, Any]
    """The same as JSON."""
