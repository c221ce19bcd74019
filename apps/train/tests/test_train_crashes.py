"""One rank fails or dies: all end soon, the cause is what the console ends with."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import runs
from launchers import PROGRAM
from test_train_launch import TORCHRUN, runs_still
from test_train_stopping import flags, ranks_of, running

from kenotron_ckpt import FolderLock
from kenotron_train.failures.last_failure import latest_start, noted

SAMPLE = """
def sample(i):
    if i == 21:  # of the first data rank, in step 15
        raise LookupError("sample 21 is not there")
"""


def own(folder: Path, sample: str = SAMPLE, **more: object) -> list[str]:
    (folder / "script.py").write_text(PROGRAM.format(sample=sample.strip()))
    changes = {"data_stages__0__data__dataset": "null", "parallelism__dp": 2} | more
    given = flags(folder, "one", **changes, tokens__micro_batch_size=2)
    at = next(i for i, flag in enumerate(given) if "hf_dataset" in flag)
    return given[: at - 1] + given[at + 1 :]


def start(folder: Path, *launcher: str) -> tuple[float, str, int]:
    began = time.monotonic()
    done = runs.start(*launcher, "script.py", *own(folder), cwd=folder)
    return time.monotonic() - began, done.stderr, done.returncode


def test_the_cause_is_the_last_line_of_a_run_that_spawned(tmp_path: Path) -> None:
    _, stderr, code = start(tmp_path, sys.executable)
    assert code == 1
    end = "\nLookupError: sample 21 is not there\nwhile reading sample 21 (source 'Python sources')"
    assert stderr.rstrip().endswith(end), stderr
    assert stderr.count("Traceback") <= 2, stderr  # that of the rank, and what its data raised
    _, stderr, _ = start(tmp_path, sys.executable)
    last = stderr.rstrip().splitlines()[-1]
    assert last.startswith("the run has now failed 2 times in a row at step "), stderr


def test_torchrun_ends_with_the_cause_and_notices_that_it_comes_again(tmp_path: Path) -> None:
    _, stderr, code = start(tmp_path, *TORCHRUN, "2", "--max-restarts", "1")
    assert code != 0
    report = stderr[stderr.rindex("Root Cause") :]
    assert "LookupError: sample 21 is not there" in report, stderr
    assert "the run has now failed 2 times in a row at step" in report, stderr
    assert json.loads((tmp_path / "checkpoints/failure.json").read_text())["times"] == 2


@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "4")], ids=["spawned", "torchrun"])
def test_a_killed_rank_ends_all_within_seconds(launcher: tuple, tmp_path: Path) -> None:
    long = flags(tmp_path, "four", tokens__train_steps=100_000)
    with running(tmp_path, *long, steps=3, launcher=launcher) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = list(map(int, children)) if launcher else ranks_of(process.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        began = time.monotonic()
        out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20  # torchrun looks twice a second
    assert not any(map(runs_still, ranks))
    assert process.returncode not in (0, 85)
    tail = "\n".join(out.rstrip().splitlines()[-12:])
    assert "SIGKILL" in tail, out


def test_only_the_same_failure_at_the_same_step_counts(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"

    def start(last: int) -> None:
        lock = FolderLock(tmp_path)
        metrics.write_text(json.dumps({"step": last}) + "\n")
        lock.release()
        time.sleep(0.02)  # the clock of file systems ticks every few milliseconds

    assert noted(tmp_path, "a") == "" and not (tmp_path / "failure.json").exists()
    start(4)
    assert noted(tmp_path, "a") == ""
    assert noted(tmp_path, "a") == ""  # another rank of the same start
    start(4)
    assert "failed 2 times in a row at step 5" in noted(tmp_path, "a")
    assert "starting it again will not help" in noted(tmp_path, "a")
    assert "again will help once that has passed" in noted(tmp_path, "a", passes=True)
    start(4)
    assert noted(tmp_path, "b") == ""
    start(9)
    assert noted(tmp_path, "b") == ""
    (tmp_path / "failure.json").write_text("cut o")
    start(9)
    assert noted(tmp_path, "b") == ""
    (tmp_path / "failure.json").unlink()  # a start that ended before it had the folder
    before = latest_start(tmp_path)
    metrics.write_text('{"step": 9}\n{"step": 10}\n')  # another start is still writing
    assert noted(tmp_path, "b", before) == ""
    assert not (tmp_path / "failure.json").exists()
