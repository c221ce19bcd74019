"""Steps that are kept while ranks die: an elastic run, and torchrun that restarts from the disk.

Both train the same model. Every so many seconds a random rank gets SIGKILL. Goodput is the number
of steps of a disturbed run over that of an undisturbed one in the same time, start included. The
elastic run has copies in memory and continues with fewer ranks; where none is left, all are started
again. torchrun starts all ranks again, from the newest checkpoint on the disk.

Nothing else may run meanwhile. With the defaults it takes 50 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kenotron_train.log.metrics_file import last_step

APP = Path(__file__).parents[1]
MARK = "KENOTRON_GOODPUT"
"""Environment variable of all processes that are started here."""
COMMON = {
    "parallelism.tp": 1, "tokens.train_steps": 10**6, "tokens.global_batch_size": 12,
    "tokens.micro_batch_size": 1, "tokens.limit_val_batches": 0,
    "logging.log_level": "error", "checkpoints.keep_last": 2,
}  # fmt: skip
KINDS = {
    "elastic": {"parallelism.dp": "auto", "checkpoints.memory_every": 1},
    "torchrun": {"tokens.batch_accumulation_per_replica": "null"},
}


def command(kind: str, folder: Path, ranks: int, interval: int) -> list[str]:
    """Return the command of a run; ``interval``: steps between its checkpoints on the disk."""
    keys = COMMON | KINDS[kind]
    keys |= {"checkpoints.checkpoints_path": folder, "checkpoints.checkpoint_interval": interval}
    if kind == "torchrun":
        keys["parallelism.dp"] = ranks
    flags = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    if kind == "elastic":
        return [sys.executable, str(APP), "--ranks", str(ranks), *flags]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000000")
    return [sys.executable, *launcher, "--nproc-per-node", str(ranks), str(APP), *flags]


def ranks_of(kind: str, pid: int, mark: str) -> list[int]:
    """Processes that train: children of torchrun, or of the process that ranks are forked from."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    children = {each for each, parent in parents.items() if parent == pid}
    if kind == "torchrun":
        return sorted(children)
    return sorted(each for each, parent in parents.items() if parent in children)


def steps_in(kind: str, folder: Path, given: argparse.Namespace, kills: float | None) -> int:
    """Train for some time, with a kill every ``kills`` seconds (None: none); the last step."""
    draw, env = random.Random(given.seed), os.environ | {MARK: str(folder), "OMP_NUM_THREADS": "1"}
    words = command(kind, folder, given.ranks, given.interval)
    begun = time.monotonic()
    end, due = begun + given.seconds, begun + (kills or given.seconds)
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while (now := time.monotonic()) < end:
            if process.poll() is not None:  # too few ranks were left
                process = subprocess.Popen(
                    words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            if now >= due and (ranks := ranks_of(kind, process.pid, str(folder))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(ranks), signal.SIGKILL)
                due = now + (kills or given.seconds)
            time.sleep(0.05)
        path = folder / "metrics.jsonl"
        return last_step(path) if path.exists() else 0
    finally:
        everything = [process.pid, *ranks_of(kind, process.pid, str(folder))]
        for each in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()


def main(words: Sequence[str] | None = None) -> None:
    """Print a table: goodput of both for every interval between failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=float, nargs="+", default=[15, 60, 300], metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--interval", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    print(f"{'a kill every':>14} {'elastic':>10} {'torchrun':>10}")
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        whole = {kind: steps_in(kind, Path(folder, kind), given, None) for kind in KINDS}
        print(f"{'never':>14} {whole['elastic']:>10} {whole['torchrun']:>10} steps", flush=True)
        for kills in given.kills:
            shares = [
                steps_in(kind, Path(folder, f"{kind}-{kills}"), given, kills) / max(whole[kind], 1)
                for kind in KINDS
            ]
            print(f"{kills:>12g} s {shares[0]:>10.1%} {shares[1]:>10.1%}", flush=True)


if __name__ == "__main__":
    main()
