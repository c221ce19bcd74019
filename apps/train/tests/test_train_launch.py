"""The same run under torchrun; a killed rank; a wrong number of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from kenotron_train.run.start_ranks import _secret_file

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(step["lm_loss"], step["grad_norm"]) for step in runs.metrics(folder)]


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_torchrun_trains_the_same_numbers(tmp_path: Path, axis: str) -> None:
    for name in ("spawned", "launched"):
        (tmp_path / name).mkdir()
    flags = {"parallelism__tp": 1, f"parallelism__{axis}": 2, "tokens__train_steps": 3}
    flags["tokens__limit_val_batches"] = 0
    spawned, launched = tmp_path / "spawned", tmp_path / "launched"
    first = runs.train(spawned, *runs.arguments(spawned, **flags))
    second = runs.start(
        *TORCHRUN, "2", str(runs.APP), *runs.arguments(launched, **flags), cwd=launched
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert losses(spawned) == losses(launched)
    assert len(losses(launched)) == 3
    assert not (launched / "checkpoints/.job-secret").exists()  # all ranks have read it


def test_ranks_get_a_secret_from_the_folder_of_the_run(tmp_path: Path, monkeypatch) -> None:
    assert _secret_file(tmp_path / "a/b") == tmp_path / "a/b/.job-secret"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert _secret_file(tmp_path / "a/b") is None


def test_a_wrong_number_of_processes_is_a_sentence_said_once(tmp_path: Path) -> None:
    flags = runs.arguments(tmp_path, parallelism__tp=2)
    done = runs.start(*TORCHRUN, "3", str(runs.APP), *flags, cwd=tmp_path)
    assert done.returncode != 0
    sentence = "tp=2 = 2, but the world has 3 ranks: change the sizes or start 2 processes"
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and sentence in said[0]  # torchrun's own report has it for every rank


def descendants(pid: int) -> list[int]:
    """All children of a process, and theirs, from one look at the processes there are."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for each in found:  # grows while it is read
        found += children.get(each, [])
    return found


def runs_still(pid: int) -> bool:
    """Whether a process exists and is no zombie that nobody has collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_killed_rank_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    flags = runs.arguments(tmp_path, parallelism__tp=2, tokens__train_steps=10_000)
    command = [sys.executable, str(runs.APP), *flags]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        metrics, saved = (
            tmp_path / "checkpoints" / p for p in ("metrics.jsonl", "3/manifest.json")
        )
        deadline = time.monotonic() + 60
        while not (saved.exists() and metrics.exists() and len(runs.metrics(tmp_path)) >= 4):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        family = descendants(process.pid)
        os.kill(max(family), signal.SIGKILL)
        began = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode != 0
    assert "killed: died of SIGKILL" in stderr and "Traceback" not in stderr
    deadline = time.monotonic() + 10
    while any(map(runs_still, family)):
        assert time.monotonic() < deadline, "processes are left behind"
        time.sleep(0.1)
    assert (tmp_path / "checkpoints/3/manifest.json").exists()
