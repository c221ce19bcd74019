"""Training on two hosts under torchrun, under mpirun, and through an elastic restart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launchers
import pytest
import runs
import two_hosts
from test_train_crashes import own
from test_train_launch import TORCHRUN

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n")
DIES_ONCE = """
import os, signal, time

def sample(i):
    # Of the second data rank, in step 6; the checkpoint of step 3 is written beside the training.
    if i == 139 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        while not os.path.exists("checkpoints/3/manifest.json"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""
NO_MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """The curve of one process; its batch has two micro-batches."""
    return launchers.trained(tmp_path_factory.mktemp("one"), **launchers.SHORT)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[two_hosts.Hosts]:
    try:
        with two_hosts.two_hosts(tmp_path) as both:
            yield both
    except two_hosts.NoHosts as error:
        pytest.skip(f"no network namespaces here: {error}")


def halves(folder: Path, **changes: object) -> list[str]:
    """Flags of a run with the batch of ``one`` over two data ranks."""
    batch = {"parallelism__dp": 2, "tokens__batch_accumulation_per_replica": 1}
    return launchers.flags(folder, **launchers.SHORT, **batch, **changes)


def test_torchrun_on_two_hosts_trains_as_one_process_does(hosts, one, tmp_path) -> None:
    many = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "hosta:29400")
    flags = halves(tmp_path, parallelism__tp=2)
    command = (*TORCHRUN, "2", *many, "--rdzv-id", "a-run", str(runs.APP), *flags)
    started = [hosts.start(host, *command, cwd=tmp_path) for host in ("hosta", "hostb")]
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    launchers.same_training(tmp_path, one)
    gradients = 3 * 4 * 16_000  # in each step at least those of one tp rank, in float32
    assert all(hosts.received(host) > gradients for host in ("hosta", "hostb"))


def test_torchrun_starts_ranks_again_and_they_go_on_from_the_checkpoint(tmp_path) -> None:
    outputs = []
    again = (*TORCHRUN, "2", "--max-restarts", "1", "--monitor-interval", "0.1")
    for name, launcher in (("whole", (sys.executable,)), ("restarted", again)):
        folder = tmp_path / name
        changes = {"tokens__train_steps": 8, "checkpoints__checkpoint_interval": 3}
        folder.mkdir()
        flags = own(folder, DIES_ONCE, **changes)
        done = runs.start(*launcher, "script.py", *flags, cwd=folder, timeout=240)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "Resumed after step 3 from" in outputs[1]
    whole, restarted = (launchers.losses(tmp_path / name) for name in ("whole", "restarted"))
    assert restarted == whole and len(whole) == 8


@NO_MPI
def test_mpirun_trains_as_one_process_does(one, tmp_path) -> None:
    command = [*MPIRUN, "4", sys.executable, str(runs.APP), *halves(tmp_path, parallelism__pp=2)]
    done = subprocess.run(
        command, cwd=tmp_path, env=launchers.environment(), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launchers.same_training(tmp_path, one)


@NO_MPI
def test_a_failing_rank_ends_mpirun_with_the_cause(tmp_path) -> None:
    flags = own(tmp_path)
    mark = f"KENOTRON_TEST={tmp_path}"
    done = subprocess.run(
        [*MPIRUN, "2", sys.executable, "script.py", *flags], cwd=tmp_path,
        env=launchers.environment(KENOTRON_TEST=str(tmp_path)), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 75), done.stderr
    assert "LookupError: sample 21 is not there" in done.stderr
    launchers.until(lambda: not launchers.marked(mark), lambda: "processes are left", 10)
