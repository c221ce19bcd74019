"""Description of a run besides its figures: layout, model, seed, dates, and the config."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from kenotron_config import ConfigError, load_config
from kenotron_models import parameter_count

CONFIG = "config.yaml"


@dataclass(frozen=True)
class About:
    """A run in words."""

    words: str = ""
    """Layout, model, batch, seed and date; empty where no checkpoint has a config."""
    config: str = ""
    """The config of its newest checkpoint, as YAML."""


def about_run(metrics: Path) -> About:
    """Describe the run whose metrics.jsonl this is, by its newest config that can be read."""
    folders = [each for each in metrics.parent.glob("*/") if each.name.isdecimal()]
    newest_first = sorted(folders, key=lambda folder: -int(folder.name))
    for file in (folder / CONFIG for folder in newest_first):
        try:
            text = file.read_text(encoding="utf-8")
            config = load_config(file)
        except (OSError, ValueError, ConfigError):
            continue
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(metrics.stat().st_mtime))
        batch = config.batches.full(0) * config.sequence_of(0)
        words = (
            f"{config.parallelism.described}; {parameter_count(config.decoder):,} parameters; "
            f"{batch:,} tokens a step; seed {config.general.seed}; last written {written}"
        )
        return About(words, text)
    return About()
