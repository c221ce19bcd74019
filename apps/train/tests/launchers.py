"""What tests of launchers share: a clean environment, the curve to compare with, waiting."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

from kenotron_config import DEFAULT_CONFIG

SHORT = {"tokens__train_steps": 3, "tokens__limit_val_batches": 0}
"""Changes of ``flags`` for a run of three steps."""
PROGRAM = """
from kenotron_dist import shutdown
from kenotron_train.cli import main
from kenotron_train.data.own_data import OwnData

{sample}
    return [i * j % 251 for j in range(33)]

if __name__ == "__main__":
    try:
        raise SystemExit(main(loader=OwnData(sample, samples=160)))
    finally:
        shutdown()
"""
"""A program with data of its own; ``sample`` is the beginning of the function that reads them."""
_OTHERS = ("OMPI_", "SLURM_", "PMI", "TORCHELASTIC_", "MASTER_")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_CONF")


def environment(**changes: str) -> dict[str, str]:
    """Variables of a shell in which no launcher is at work."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OTHERS) and k not in _RANKS}
    return kept | {"OMP_NUM_THREADS": "1"} | changes


def flags(folder: Path, **changes: object) -> list[str]:
    """Flags of a tiny run. It names its config, so that it does not end with a sample of text."""
    folder.mkdir(exist_ok=True)
    return ["--config-file", str(DEFAULT_CONFIG), *runs.arguments(folder, **changes)]


def until(is_so: Callable[[], bool], failed: Callable[[], str], seconds: float = 240) -> None:
    """Wait for a condition; ``failed`` says what is shown when it does not come."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(failed())
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes, no zombies, that were started with ``NAME=value`` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def steps_made(folder: Path) -> int:
    """Steps in the metrics of a run, which may not have begun."""
    file = folder / "checkpoints/metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and norm of the gradient."""
    return [(step["step"], step["lm_loss"], step["grad_norm"]) for step in runs.metrics(folder)]


def same_training(folder: Path, want: list[tuple[int, float, float]]) -> None:
    """Compare a run on several ranks with one on one: equal but for the order of sums."""
    found = losses(folder)
    assert [step for step, *_ in found] == [step for step, *_ in want]
    for (_, *ours), (_, *theirs) in zip(found, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def trained(folder: Path, **changes: object) -> list[tuple[int, float, float]]:
    """The curve of a run that the app starts by itself."""
    done = runs.program("apps/train", folder, *flags(folder, **changes), timeout=240)
    assert done.returncode == 0, done.stderr
    return losses(folder)
