"""Time and memory of dry runs of 16,384 ranks: a dense model of 405B, and one of 393B with experts.

Memory is the most that the process and those of its pool have at once, pages that they share
counted once (PSS). Asked: under 60 s and 4 GB on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_step import surroundings

TRAIN = Path(__file__).parents[1]
MODEL = "model.model_config."
PAUSE = 3.0
"""Seconds between two looks at the memory, which take time of a core themselves."""
RUNS: dict[str, tuple[str, dict[str, int]]] = {
    "405B dense": (
        "llama-3.1-70b.yaml",
        {
            "parallelism.dp": 128, "parallelism.pp": 16, MODEL + "hidden_size": 16384,
            MODEL + "intermediate_size": 53248, MODEL + "num_hidden_layers": 126,
            MODEL + "num_attention_heads": 128, "tokens.batch_accumulation_per_replica": 16,
        },
    ),
    "393B-A17B experts": (
        "qwen3-30b-a3b.yaml",
        {
            "parallelism.dp": 1024, "parallelism.pp": 16, "parallelism.ep": 32,
            MODEL + "hidden_size": 5120, MODEL + "num_attention_heads": 64,
            MODEL + "num_key_value_heads": 8, MODEL + "moe_intermediate_size": 4096,
            MODEL + "num_experts_per_tok": 4,
        },
    ),
}  # fmt: skip


def held(group: int) -> int:
    """Bytes of the processes of a group; one that ends meanwhile counts nothing."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return total * 1024


def measured(file: str, keys: dict[str, int]) -> dict[str, Any]:
    """Seconds, most bytes and the first line of a dry run."""
    words = [sys.executable, str(TRAIN), "--dry-run"]
    words += ["--config-file", str(TRAIN / "configs/known" / file)]
    words += [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    start, most = time.perf_counter(), 0
    own = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **own) as run:
        while run.poll() is None:
            most = max(most, held(run.pid))
            time.sleep(PAUSE)
        assert run.stdout is not None
        said = run.stdout.read().splitlines()[0]
    return {"seconds": time.perf_counter() - start, "gb": most / 1e9, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of large dry runs.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    found = {}
    for name, run in RUNS.items():
        found[name] = each = measured(*run)
        print(f"{name:<18} {each['seconds']:5.1f} s  {each['gb']:.2f} GB  {each['said']}")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps({**surroundings(), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
