"""Step times that `plan` says beside those of real steps, on 1, 2 and 4 local ranks.

In every round the machine is measured by `plan calibrate`, then each layout of as many ranks makes
some steps of synthetic tokens. All ranks compute at once in both, with one thread each. The table
has medians over the rounds, a step as long as its slowest rank, and the median ratio of the planned
to the measured seconds. It takes 8 minutes on two free cores; what else runs there changes them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_step import surroundings

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_cost import Machine, Planner, cost_plan, machine_named, own_layout, recomputed
from kenotron_data import Cursor
from kenotron_dist import Mesh, barrier, spawn
from kenotron_engine import training_step
from kenotron_train.assemble import build_training, data_plan
from kenotron_train.config_file import parse_config
from kenotron_train.data.stage_dataset import open_corpus, open_loader

WARM_UP = 1
SEQUENCE, SAMPLES = 256, 8
SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
    "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = SIZES | {
    "is_qwen2_config": True, "moe_config": {
        "num_experts": 4, "top_k": 2, "moe_intermediate_size": 768, "layers": [0, 1, 2, 3]},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, object]] = {
    "one process": {},
    "one process, recompute": {"recompute": "full"},
    "one process, experts": {"experts": True},
    "dp 2, ZeRO 0": {"dp": 2, "zero": 0},
    "dp 2, ZeRO 1": {"dp": 2},
    "dp 2 x ep 2, experts": {"dp": 2, "ep": 2, "experts": True},
    "tp 2": {"tp": 2, "tp_mode": "REDUCE_SCATTER"},
    "pp 2": {"pp": 2},
    "dp 2 x tp 2": {"dp": 2, "tp": 2, "tp_mode": "REDUCE_SCATTER"},
    "pp 2 x dp 2": {"pp": 2, "dp": 2},
    "pp 2 x tp 2": {"pp": 2, "tp": 2, "tp_mode": "REDUCE_SCATTER"},
}


def configured(layout: dict[str, object]) -> Config:
    """The default config with a larger model on a layout; the global batch is the same on all."""
    text = DEFAULT_CONFIG.read_text()
    sizes = {"pp": 1, "dp": 1, "tp": 1, "tp_mode": "ALL_REDUCE"} | layout
    experts, zero = sizes.pop("experts", False), sizes.pop("zero", 1 if "dp" in layout else 0)
    values = {f"parallelism.{name}": size for name, size in sizes.items()}
    if experts:
        values["model.model_config"] = json.dumps(EXPERTS)
    else:
        values |= {f"model.model_config.{name}": size for name, size in SIZES.items()}
    values["optimizer.zero_stage"] = zero
    values["optimizer.optimizer_factory.torch_adam_is_fused"] = "true"
    values["data_stages.0.data.dataset"] = "null"
    values["tokens.sequence_length"], values["tokens.micro_batch_size"] = SEQUENCE, 1
    values["tokens.batch_accumulation_per_replica"] = SAMPLES // int(str(sizes["dp"]))
    return parse_config(text, "default.yaml", [f"{key}={value}" for key, value in values.items()])


def step_seconds(mesh: Mesh, config: Config, steps: int) -> list[float]:
    """Seconds of each step of this rank, from a barrier to a barrier."""
    training, found = build_training(config, mesh), list[float]()
    with open_loader(
        data_plan(config), mesh, open_corpus(data_plan(config), 0), Cursor()
    ) as loader:
        for _ in range(WARM_UP + steps):
            batch = next(loader)
            barrier(mesh.world)
            begun = time.perf_counter()
            training_step(training, batch, 1)
            barrier(mesh.world)
            found.append(time.perf_counter() - begun)
    return found[WARM_UP:]


def calibrated(ranks: int, seconds: float, folder: Path) -> Machine:
    """This machine as so many ranks find it."""
    file = folder / f"{ranks}.json"
    flags = ["--write", str(file), "--ranks", str(ranks), "--seconds", str(seconds)]
    words = ["calibrate", *flags, "--sequence-length", str(SEQUENCE)]
    app = str(Path(__file__).parents[2] / "plan")
    subprocess.run([sys.executable, app, *words], check=True, stdout=sys.stderr)
    return machine_named(str(file))


def compared(
    ranks: int, names: list[str], options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Measured and planned seconds of layouts of so many ranks, after a calibration."""
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        machine = calibrated(ranks, options.seconds, Path(folder))
    for name in names:
        config = configured(LAYOUTS[name])
        times = spawn(step_seconds, config, options.steps, **config.parallelism.grid)
        measured = statistics.median(max(each) for each in zip(*times, strict=True))
        plan = cost_plan(config)
        planner = Planner(plan, machine, machine["memory"])
        planned = planner.estimate(own_layout(config), plan, recomputed(plan)).time
        found[name] = measured, planned.seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Step times that plan says, and real ones.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each layout and round")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each calibration")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of calibrations and of steps
    found: dict[str, dict[str, float]] = {}
    print(f"{'layout':<24} {'measured ms':>12} {'planned ms':>12} {'ratio':>7}  ratios of rounds")
    for ranks in sorted({configured(layout).world_size for layout in LAYOUTS.values()}):
        names = [n for n, layout in LAYOUTS.items() if configured(layout).world_size == ranks]
        rounds = [compared(ranks, names, options) for _ in range(options.rounds)]
        for name in names:
            measured, planned = (statistics.median(r[name][i] for r in rounds) for i in (0, 1))
            ratios = [r[name][1] / r[name][0] for r in rounds]
            ratio, each = statistics.median(ratios), " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"{name:<24} {measured * 1e3:>12.0f} {planned * 1e3:>12.0f} {ratio:>7.2f}  {each}"
            )
            found[name] = {"measured_s": measured, "planned_s": planned, "ratio": ratio}
    outside = [name for name, each in found.items() if not 0.85 <= each["ratio"] <= 1.15]
    print(f"{len(found) - len(outside)} of {len(found)} within 15 %; outside: {outside or 'none'}")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps({**surroundings(), "layouts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
