"""Train configs/shakespeare.yaml on four layouts and compare them: losses and final validation.

    python apps/train/benchmarks/run_shakespeare.py --text input.txt --json result.json

Bounds: validation loss at most 1.88 nats a character (nanoGPT's published figure for this recipe),
losses of the first 20 steps within 1e-5 of one process, final validation within 0.01 of it.
Exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

APP = Path(__file__).parents[1]
LAYOUTS = {
    "one process": {},
    "tp2": {"parallelism.tp": 2},
    "dp2": {"parallelism.dp": 2, "tokens.micro_batch_size": 6},
    "pp2": {
        "parallelism.pp": 2,
        "tokens.micro_batch_size": 6,
        "tokens.batch_accumulation_per_replica": 2,
    },
}


def run(text: Path, changes: dict[str, int], steps: int, folder: Path) -> dict:
    """One training; its losses, validation loss and seconds."""
    values = changes | {
        "tokens.train_steps": steps,
        "checkpoints.checkpoints_path": folder,
        "data_stages.0.data.dataset.hf_dataset_or_datasets": text.resolve(),
    }
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    began = time.perf_counter()
    config = str(APP / "configs/shakespeare.yaml")
    subprocess.run([sys.executable, str(APP), "--config-file", config, *flags], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [line["lm_loss"] for line in lines if "lm_loss" in line],
        "validation": [line["validation_loss"] for line in lines if "validation_loss" in line][-1],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, good, want = {}, True, None
    for name, changes in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            got = run(arguments.text, changes, arguments.steps, Path(folder))
        want = want or got
        pairs = zip(got["losses"][:20], want["losses"][:20], strict=True)
        deviation = max(abs(a - b) / b for a, b in pairs)
        apart = abs(got["validation"] - want["validation"])
        good &= got["validation"] <= 1.88 and deviation <= 1e-5 and apart <= 0.01
        rows[name] = {
            "validation_loss": round(got["validation"], 4),
            "from_one_process": round(apart, 5),
            "first_20_steps": float(f"{deviation:.1e}"),
            "seconds": got["seconds"],
        }
        print(name, rows[name], flush=True)
    if arguments.json:
        about = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
        about |= {"cores": os.cpu_count(), "steps": arguments.steps, "layouts": rows}
        arguments.json.write_text(json.dumps(about, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
