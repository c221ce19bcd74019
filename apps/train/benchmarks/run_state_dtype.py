"""Train the built-in model for 2,000 steps with each number format of the optimizer's state.

    python apps/train/benchmarks/run_state_dtype.py --json apps/train/benchmarks/state_dtype.json

Each format is trained from two seeds, whose distance says what a difference means. Exits with 1
where offload changes a loss, or where bfloat16 is farther from float32 than ``LARGEST``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kenotron_config import DEFAULT_CONFIG

APP = Path(__file__).parents[1]
LARGEST = 0.03
"""Nats a token, between the means of both formats over the last tenth of the steps."""
POINTS = 20
"""Of a curve: each is the mean of so many equal parts of the steps."""
MODEL: dict[str, Any] = {
    "parallelism.tp": 1,
    "tokens.batch_accumulation_per_replica": 1,
    "model.model_config.hidden_size": 64,
    "model.model_config.intermediate_size": 176,
    "model.model_config.num_hidden_layers": 2,
    "optimizer.optimizer_factory.adam_beta2": 0.999,
    "checkpoints.checkpoint_interval": 1_000_000,
}
RUNS: dict[str, dict[str, Any]] = {
    "float32, seed 1": {"general.seed": 1},
    "bfloat16, seed 1": {"general.seed": 1, "optimizer.state_dtype": "bfloat16"},
    "float32, seed 2": {"general.seed": 2},
    "bfloat16, seed 2": {"general.seed": 2, "optimizer.state_dtype": "bfloat16"},
    "float32, seed 1, offload": {"general.seed": 1, "optimizer.offload": True},
}


def train(changes: dict[str, Any], steps: int, folder: Path) -> tuple[list[float], float]:
    """Losses of all steps, and the validation loss after the last one."""
    values = MODEL | changes
    values |= {"tokens.train_steps": steps, "checkpoints.checkpoints_path": folder}
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    config = str(DEFAULT_CONFIG)
    subprocess.run(
        [sys.executable, str(APP), "--config-file", config, *flags],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["lm_loss"] for line in lines if "lm_loss" in line]
    return losses, [line["validation_loss"] for line in lines if "validation_loss" in line][-1]


def shown(losses: list[float], validation: float) -> dict[str, Any]:
    """A curve of a few points."""
    size = len(losses) // POINTS
    means = [statistics.fmean(losses[i * size : (i + 1) * size]) for i in range(POINTS)]
    return {"curve": [round(mean, 4) for mean in means], "validation": round(validation, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    losses: dict[str, list[float]] = {}
    runs: dict[str, dict[str, Any]] = {}
    for name, changes in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            losses[name], validation = train(changes, options.steps, Path(folder))
        runs[name] = shown(losses[name], validation)
        print(f"{name:26} {runs[name]}", flush=True)
    last = options.steps // 10
    ends = {name: statistics.fmean(each[-last:]) for name, each in losses.items()}
    apart = statistics.fmean(
        ends[f"bfloat16, seed {seed}"] - ends[f"float32, seed {seed}"] for seed in (1, 2)
    )
    seeds = abs(ends["float32, seed 1"] - ends["float32, seed 2"])
    same = losses["float32, seed 1"] == losses["float32, seed 1, offload"]
    figures = {"bfloat16_minus_float32": round(apart, 4), "between_seeds": round(seeds, 4)}
    print(figures, f"offload has the same losses: {same}")
    if options.json:
        about = {"torch": torch.__version__, "steps": options.steps, **figures}
        found = about | {"offload_is_equal": same, "runs": runs}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return not (same and abs(apart) <= LARGEST)


if __name__ == "__main__":
    raise SystemExit(main())
