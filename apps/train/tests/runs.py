"""Small runs of the app, as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import warm

APP = Path(__file__).parents[1]
TINY_LLAMA = APP.parents[1] / "packages/kenotron-config/tests/tiny_llama.yaml"
TINY = {
    "model.model_config.hidden_size": 32,
    "model.model_config.intermediate_size": 48,
    "model.model_config.num_hidden_layers": 2,
    "tokens.sequence_length": 32,
    "tokens.micro_batch_size": 2,
    "tokens.train_steps": 6,
    "tokens.limit_val_batches": 2,
    "optimizer.learning_rate_scheduler.lr_warmup_steps": 2,
    "checkpoints.checkpoint_interval": 3,
    "parallelism.tp": 1,
}


def write_text(folder: Path) -> Path:
    """A corpus that needs neither network nor much time."""
    path = folder / "corpus.txt"
    path.write_text("".join(f"line {i} of {i * i % 89}\n" for i in range(1500)))
    return path


def arguments(folder: Path, **changes: object) -> list[str]:
    """Flags of a tiny run in ``folder``; ``changes`` are keys with ``__`` for the dots."""
    values = TINY | {
        "data_stages.0.data.dataset.hf_dataset_or_datasets": write_text(folder),
        "checkpoints.checkpoints_path": folder / "checkpoints",
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def start(*command: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it prints."""
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """``python apps/train`` with these flags, in ``folder``."""
    return program("apps/train", folder, *flags)


def program(
    name: str, folder: Path, *flags: str, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What ``python <name>`` does with these flags, without the seconds in which it starts."""
    if worker := warm.shared():
        return worker.run(folder, name, list(flags), timeout)
    return start(sys.executable, str(APP.parents[1] / name), *flags, cwd=folder, timeout=timeout)


def metrics(folder: Path, run: str = "checkpoints") -> list[dict]:
    """The steps of a run's metrics.jsonl."""
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
