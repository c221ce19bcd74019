"""Training under Slurm: srun over two nodes; a job that is stopped, put back, and goes on."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import launchers
import pytest
import runs
import slurm_cluster
from test_train_crashes import own

from kenotron_train.config_file import load_config

pytestmark = [
    pytest.mark.xdist_group("slurm"),  # one cluster for all of them
    pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not()),
]
SRUN = ("srun", "--nodes=2", "--ntasks-per-node=2")
LONG = {
    "tokens__train_steps": 100,
    "tokens__limit_val_batches": 0,
    "checkpoints__checkpoint_interval": 1000,
    "parallelism__tp": 2,
}
SLOW = """
import os, time

def sample(i):
    time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else 0.5)
"""
"""Own data that keeps a job's first start running, without work for the processors."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(slurm_cluster.cluster())
        except slurm_cluster.NoCluster as error:
            pytest.skip(str(error))
        yield own


def submit(cluster, folder: Path, program: Path, *flags: str) -> str:
    """Submit a run over two nodes; the number of its job."""
    nodes = ("--nodes", "2", "--gpus-per-node", "0", "--time", "30")
    done = cluster.run(sys.executable, str(program), "slurm", *nodes, *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("Submitted job ")[1].split(":")[0]


def story(cluster, number: str, log: Path) -> str:
    """What is shown where a job does not go on as it should."""
    said = log.read_text() if log.exists() else ""
    return f"{cluster.job(number)}\n{said}\n{cluster.logs()}"


def test_srun_over_two_nodes_trains_as_one_process_does(cluster, tmp_path) -> None:
    want = launchers.trained(tmp_path / "one", **launchers.SHORT)
    flags = launchers.flags(tmp_path, **launchers.SHORT, parallelism__pp=2, parallelism__tp=2)
    done = cluster.run(*SRUN, sys.executable, str(runs.APP), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + cluster.logs()
    launchers.same_training(tmp_path, want)


def test_a_job_is_stopped_put_back_and_goes_on(cluster, tmp_path) -> None:
    flags = launchers.flags(tmp_path, **LONG)
    number = submit(cluster, tmp_path, runs.APP, *flags, "--partition", "all")
    (folder,) = tmp_path.glob("checkpoints/slurm/*")
    log = folder / f"{number}.out"
    told = partial(story, cluster, number, log)

    launchers.until(lambda: launchers.steps_made(tmp_path) >= 3, told)
    signalled = cluster.run("scancel", "--signal=USR1", number)  # as Slurm does before the end
    assert signalled.returncode == 0, signalled.stderr
    launchers.until(lambda: cluster.job(number).get("JobState") == "COMPLETED", told)
    said = log.read_text()
    assert cluster.job(number)["Restarts"] == "1", said
    stopped = int(said.split("Stopped after step ")[1].split(",")[0])
    assert 3 <= stopped < LONG["tokens__train_steps"]
    assert "received SIGUSR1" in said and "Stopped with a checkpoint: back into the queue" in said
    assert "start 1, on n[1-2]\n" in said and "start 2, on n[1-2]\n" in said
    assert f"Resumed after step {stopped}" in said
    kept = {path.name for path in folder.iterdir()}
    files = {"job.sbatch", "config.yaml", "launch.json", "packages.txt", log.name, f"job-{number}"}
    assert kept == files
    assert load_config(folder / "config.yaml").tokens.train_steps == LONG["tokens__train_steps"]
    origin = json.loads((folder / "launch.json").read_text())
    assert origin["command"][1:4] == [str(runs.APP), "slurm", "--nodes"]
    assert origin["cwd"] == str(tmp_path)
    assert launchers.losses(tmp_path) == launchers.trained(tmp_path / "whole", **LONG)  # to the bit


def test_a_job_whose_time_is_over_goes_on_in_another_start(cluster, tmp_path) -> None:
    flags = own(tmp_path, SLOW, tokens__train_steps=40, parallelism__tp=2)
    number = submit(cluster, tmp_path, tmp_path / "script.py", *flags)
    (folder,) = tmp_path.glob("checkpoints/slurm/*")
    log = folder / f"{number}.out"
    told = partial(story, cluster, number, log)

    def limit(minutes: int) -> None:
        done = cluster.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
        assert done.returncode == 0, done.stderr

    launchers.until(lambda: launchers.steps_made(tmp_path) >= 3, told)
    limit(4)  # its last five minutes have begun; Slurm looks at limits twice a minute
    launchers.until(lambda: "back into the queue" in log.read_text(), told)
    limit(30)
    launchers.until(lambda: cluster.job(number).get("JobState") == "COMPLETED", told)
    said = log.read_text()
    assert cluster.job(number)["Restarts"] == "1", said
    assert "received SIGUSR1" in said
    stopped = int(said.split("Stopped after step ")[1].split(",")[0])
    assert 3 <= stopped < 40
    assert f"Resumed after step {stopped}" in said
    assert [step for step, *_ in launchers.losses(tmp_path)] == list(range(1, 41))


def test_slurm_s_own_reason_is_told_and_nothing_is_left(cluster, tmp_path) -> None:
    flags = ["--nodes", "3", "--gpus-per-node", "0", *launchers.flags(tmp_path, parallelism__dp=3)]
    words = (sys.executable, str(runs.APP), "slurm", *flags, "--partition", "nowhere")
    done = cluster.run(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "sbatch refused the job (" in done.stderr and "invalid partition" in done.stderr
    assert not list(tmp_path.glob("checkpoints/slurm/*"))
