"""Compare final runs on four domains: DoReMi's weights, equal ones, those of the domains' sizes.

    python apps/train/benchmarks/run_doremi.py --json result.json

Reference and proxy read equal shares. All final runs are equal but for the shares, and read as
many tokens. Each is made with several seeds; the loss of a domain is that of held-out samples.
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
from statistics import mean, stdev
from typing import Any

import torch

APP = Path(__file__).parents[1]
NAMES = ("prose", "code", "names", "sums")
STEPS = 200
SETTINGS = {
    "parallelism.dp": 1,
    "tokens.micro_batch_size": 16,
    "tokens.limit_val_batches": 40,
    "checkpoints.checkpoint_interval": 1000,
    "logging.iteration_step_info_interval": 100,
}


def start(words: list[str], values: dict[str, Any]) -> str:
    """Run the program; what it printed."""
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(APP), *words, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    return done.stdout


def last_step(folder: Path) -> dict[str, Any]:
    """What metrics.jsonl has of the last step of a run."""
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def sizes_in(log: str) -> list[int]:
    """Tokens of each domain, as the log of a run names them."""
    lines = [line for line in log.splitlines() if "tokens, kept in" in line]
    counts = (line.split(" tokens, kept in")[0].rsplit(" ", 1)[1] for line in lines)
    return [int(count.replace(",", "")) for count in counts][: len(NAMES)]


def learned(folder: Path, seed: int, steps: int) -> tuple[list[float], list[int]]:
    """Reference, losses and proxy; the averaged weights, and the sizes of the domains."""
    values = SETTINGS | {
        "checkpoints.checkpoints_path": folder / "walk",
        "tokens.train_steps": steps,
        "general.seed": seed,
        "data_stages.0.data.seed": seed,
    }
    log = start(["doremi", "reference"], values)
    start(["doremi", "losses"], values)
    start(["doremi", "proxy"], values)
    average = last_step(folder / "walk/proxy")["domain_weights_average"]
    return [average[name] for name in NAMES], sizes_in(log)


def final(folder: Path, seed: int, steps: int, weights: list[float]) -> dict[str, float]:
    """Loss of each domain after a run with given weights."""
    values = SETTINGS | {
        "checkpoints.checkpoints_path": folder,
        "tokens.train_steps": steps,
        "general.seed": seed + 1000,
        "data_stages.0.data.seed": seed + 1000,
        "doremi.domain_weights": json.dumps(weights),
    }
    config = APP / "kenotron_train/doremi/doremi.yaml"
    start(["--config-file", str(config)], values)
    found = last_step(folder)["validation_sources"]
    return {name: found[name]["loss"] for name in NAMES}


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Mean and deviation over seeds of each domain's loss, of the worst, and of all."""
    found: dict[str, Any] = {}
    for kind, each in runs.items():
        rows = {name: [run[name] for run in each] for name in NAMES}
        rows["worst"] = [max(run.values()) for run in each]
        rows["mean"] = [mean(run.values()) for run in each]
        found[kind] = {
            name: {"mean": mean(losses), "deviation": stdev(losses) if len(losses) > 1 else None}
            for name, losses in rows.items()
        }
    return found


def main() -> int:
    """Make all runs and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--final-steps", type=int, default=STEPS)
    given = parser.parse_args()
    begin, weights, runs = time.monotonic(), [], {"doremi": [], "equal": [], "sizes": []}
    for seed in range(1, given.seeds + 1):
        with tempfile.TemporaryDirectory() as name:
            average, sizes = learned(Path(name), seed, given.steps)
            weights.append(dict(zip(NAMES, average, strict=True)))
            shares = {
                "doremi": average,
                "equal": [0.25] * 4,
                "sizes": [size / sum(sizes) for size in sizes],
            }
            for kind, given_shares in shares.items():
                folder = Path(name) / kind
                runs[kind].append(final(folder, seed, given.final_steps, given_shares))
                print(seed, kind, runs[kind][-1], flush=True)
    found = {
        "machine": f"{platform.processor() or platform.machine()}, one thread",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "steps": {"reference and proxy": given.steps, "final": given.final_steps},
        "domain_weights": weights,
        "size_weights": dict(zip(NAMES, shares["sizes"], strict=True)),
        "losses": compared(runs),
        "runs": runs,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    worst = {kind: found["losses"][kind]["worst"]["mean"] for kind in runs}
    return 0 if worst["doremi"] < min(worst["equal"], worst["sizes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
