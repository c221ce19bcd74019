"""The part of a config that first weights and checkpoints follow from."""

from __future__ import annotations

from dataclasses import dataclass

from kenotron_ckpt import CheckpointsConfig, S3UploadConfig
from kenotron_config import ModelConfig
from kenotron_engine import Conditions
from kenotron_models import Multipliers


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Places of a run's checkpoints, and what they say of its config."""

    section: CheckpointsConfig
    upload: S3UploadConfig | None
    """The store that checkpoints are copied to; None: there is none."""
    model: ModelConfig
    multipliers: Multipliers
    """Those in the model."""
    conditions: Conditions | None
    """Conditions of a reproducible run on this process; None: the mode is off."""
    yaml: str
    """The config as a checkpoint has it."""
