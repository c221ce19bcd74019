"""Cost of ``checkpoints.memory_every: 1``: seconds of a step with a copy in memory and without.

Two local processes (tp 2) train one model. In every round each contestant makes some steps in a
row, in turn: without copies, and with a copy after every step, made by each engine. Steps that
follow a switch are not counted: so ``datastates`` writes the copy of the step before during each
step that counts. Nothing else may run meanwhile. With the defaults it needs 10 GB of memory, 4 GB
of them in ``/dev/shm``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench_step import configure, first_batch, surroundings

from kenotron_ckpt import Saver, on_first
from kenotron_config import Config
from kenotron_data import Batch
from kenotron_dist import Mesh, barrier, spawn
from kenotron_engine import training_step
from kenotron_train.assemble import TrainingRun, build_training
from kenotron_train.progress import Progress
from kenotron_train.run.saving import bytes_of, save_run

WIDTH, FEED_FORWARD = 1024, 2816
LAYER_BYTES = 12 * (4 * WIDTH**2 + 3 * WIDTH * FEED_FORWARD)
"""Saved bytes of a layer on all ranks: a parameter and its two moments in fp32."""
LEAD = 1
"""Steps after a switch that are not counted."""
WITHOUT, ENGINES = "no copies", {"torch": False, "datastates": True}
PHASES = ("step", "blocked", "durable")
"""Seconds of a step with its copy; those of them that it stood still; until the copy was there."""
Times = dict[str, dict[str, list[float]]]
"""Seconds of a rank, by contestant and phase."""


def config_of(given: argparse.Namespace) -> Config:
    """Return the config of a model of so many gigabytes on each of two ranks."""
    layers = max(1, round(2e9 * given.gigabytes / LAYER_BYTES))
    model = (
        f"model.model_config={{is_llama_config: true, hidden_size: {WIDTH}, "
        f"intermediate_size: {FEED_FORWARD}, num_hidden_layers: {layers}, "
        "num_attention_heads: 16, num_key_value_heads: 16, vocab_size: 257, "
        f"max_position_embeddings: {given.sequence}}}"
    )
    micro = f"tokens.micro_batch_size={given.micro_batch}"
    length = f"tokens.sequence_length={given.sequence}"
    count = f"tokens.batch_accumulation_per_replica={given.micro_batches}"
    return configure((model, micro, length, count, *given.set), tp=2)


def measure(mesh: Mesh, given: argparse.Namespace, folder: str) -> tuple[Times, int]:
    """Return this rank's seconds, and the bytes that it saves."""
    config = config_of(given)
    training, batch = build_training(config, mesh), first_batch(config, mesh)
    times: Times = {name: {each: [] for each in PHASES} for name in (WITHOUT, *ENGINES)}
    names = list(times)
    for turn in range(given.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with contextlib.ExitStack() as opened:
                saver = None
                if name in ENGINES:
                    how = {"background": ENGINES[name], "keep": 1, "on_failure": "raise"}
                    saver = opened.enter_context(Saver(Path(folder, name), mesh, **how))
                seconds = steps_of(training, batch, saver, LEAD + given.steps)
            times[name]["step"] += seconds[LEAD:]
            for report in saver.reports()[LEAD:] if saver is not None else ():
                times[name]["blocked"].append(report.blocked)
                times[name]["durable"].append(report.durable)
            on_first(mesh, lambda name=name: shutil.rmtree(Path(folder, name), ignore_errors=True))
    return times, bytes_of(training)


def steps_of(training: TrainingRun, batch: Batch, saver: Saver | None, count: int) -> list[float]:
    """Make steps, with a copy after each; seconds of each."""
    seconds = []
    before = saver.wait if saver is not None else lambda: None
    for number in range(1, count + 1):
        barrier(training.mesh.world)
        begun = time.perf_counter()
        training_step(training, batch, number, before)
        if saver is not None:
            save_run(saver, training, Progress(step=number), compared=False)
        seconds.append(time.perf_counter() - begun)
    return seconds


def table(ranks: Sequence[tuple[Times, int]]) -> dict[str, dict[str, float]]:
    """Return medians in seconds, by contestant and phase; each time is that of the slowest rank."""
    found = {}
    for name, phases in ranks[0][0].items():
        of_all = {each: [times[name][each] for times, _ in ranks] for each in phases}
        found[name] = {
            each: statistics.median(map(max, *rows)) for each, rows in of_all.items() if rows[0]
        }
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print what a copy in memory after every step costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="saved by each rank")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="in a row that count")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], help="key=value of the config")
    parser.add_argument("--memory", default="/dev/shm", help="folder that the copies go to")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="kenotron-copies-", dir=given.memory) as folder:
        ranks = spawn(measure, given, folder, tp=2)
    found, nbytes = table(ranks), max(each for _, each in ranks)
    whole = found[WITHOUT]["step"]
    print(f"{nbytes / 1e9:.3g} GB a rank, medians of {given.rounds * given.steps} steps")
    print(
        f"{'':<12} {'step s':>8} {'of a step':>10} {'blocked s':>10} {'copy is there after s':>22}"
    )
    for name, each in found.items():
        row = f"{name:<12} {each['step']:>8.3f} {each['step'] / whole - 1:>+10.1%}"
        if "blocked" in each:
            row += f" {each['blocked']:>10.3f} {each['durable']:>14.3f}"
        print(row)
    if given.json:
        about = {**surroundings(), "bytes": nbytes, "flags": vars(given) | {"json": None}}
        given.json.write_text(json.dumps({**about, "median_s": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
