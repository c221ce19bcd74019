"""Tiny runs of DoReMi on three texts, as a user starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import runs

from kenotron_config import DEFAULT_CONFIG

NAMES = ("first", "second", "third")
WEIGHTS = (0.5, 0.3, 0.2)
SECTION = f"\ndoremi: {{domain_names: '{', '.join(NAMES)}', domain_weights: {list(WEIGHTS)}}}\n"
STEPS = 6


def write_domains(folder: Path) -> None:
    """Three texts, the last of them the least regular, and the config that names them."""
    default = DEFAULT_CONFIG.read_text()
    (folder / "domains.yaml").write_text(default + SECTION)
    for place, name in enumerate(NAMES):
        (folder / "texts" / name).mkdir(parents=True)
        lines = [f"{name} {i} {i * i * (7 + place) % (11 * 9**place)}\n" for i in range(700)]
        (folder / "texts" / name / "text.txt").write_text("".join(lines))


def flags(folder: Path, run: str, **changes: object) -> list[str]:
    """Flags of a tiny run of three domains in ``folder``."""
    values: dict[str, Any] = {
        "tokens.train_steps": STEPS,
        "tokens.limit_val_batches": 1,
        "data_stages.0.data.dataset.hf_dataset_or_datasets": folder / "texts",
        "checkpoints.checkpoints_path": folder / run,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    given = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return ["--config-file", str(folder / "domains.yaml"), *runs.arguments(folder), *given]
