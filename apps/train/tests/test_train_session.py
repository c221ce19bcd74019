"""Sessions: opened one after the other in the same processes, each on a layout of its own."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from runs import arguments, metrics

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, spawn
from kenotron_train import LifeCycle
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import run

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
DP2 = {"parallelism__dp": 2, "parallelism__tp": 1, "tokens__micro_batch_size": 1}
TP2 = {"parallelism__dp": 1, "parallelism__tp": 2, "tokens__micro_batch_size": 2}
PP2 = {"parallelism__pp": 2, "parallelism__dp": 1, "parallelism__tp": 1}  # its pairs are groups
SCHEDULE = {
    "optimizer__learning_rate_scheduler__lr_warmup_steps": 2,
    "optimizer__learning_rate_scheduler__lr_decay_steps": 4,
    "tokens__limit_val_batches": 0,
}


def config_of(folder: Path, name: str, **changes: object) -> Config:
    """Six steps in ``folder/name``, on any layout the same learning rates and batches."""
    keys = SCHEDULE | {"checkpoints__checkpoints_path": folder / name} | changes
    return load_config(DEFAULT_CONFIG, arguments(folder, **keys)[1::2])


Things = tuple[list[str], list[str], list[str]]


def open_things() -> Things:
    """Names of this process' threads, its open files of runs, and its process groups."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    threads = sorted(thread.name for thread in threading.enumerate())
    groups = sorted(
        map(repr, map(dist.get_process_group_ranks, dist.distributed_c10d._world.pg_map))
    )
    return threads, sorted(file for file in files if "session-run" in file), groups


def left_open(before: Things) -> Things:
    """What is open; threads that were told to end get a moment."""
    end = time.monotonic() + 5
    while open_things() != before and time.monotonic() < end:
        time.sleep(0.02)
    return open_things()


class During(LifeCycle):
    """Looks at what is open while a session trains."""

    def post_train_step(self, training, progress, result):
        self.found = open_things()


class Fails(LifeCycle):
    """Fails after a step, on every rank."""

    def __init__(self, step: int) -> None:
        self.step = step

    def post_train_step(self, training, progress, result):
        if progress.step == self.step:
            raise RuntimeError(f"planned after step {self.step}")


def losses(mesh: Mesh, config: Config) -> list[float]:
    """Losses of an undisturbed run."""
    return [result.loss for result in run(mesh, config).results]


def two_layouts(mesh: Mesh, first: Config, second: Config) -> tuple[list[float], list[Things]]:
    """Losses of two sessions of one run, and what is open before and after it."""
    before = open_things()
    outcome = run(None, first, then=(second,))
    return [result.loss for result in outcome.results], [before, left_open(before)]


def after_a_failure(mesh: Mesh, first: Config, second: Config) -> tuple[list[float], list[Things]]:
    """Losses of a session in processes in which one has failed, and what is open meanwhile."""
    before, during = open_things(), During()
    with pytest.raises(RuntimeError, match="planned after step 5"):
        run(None, first, hooks=(during, Fails(5)))
    failed = left_open(before)
    found = [result.loss for result in run(None, second).results]
    return found, [before, failed, left_open(before), during.found]


def spawned(work: Callable, *configs: Config, **sizes: int) -> list:
    return spawn(work, *configs, **sizes, preload=PRELOAD)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of six steps in one session."""
    folder = tmp_path_factory.mktemp("undisturbed")
    first, second = spawned(losses, config_of(folder, "session-run", **DP2), dp=2)
    assert len(first) == 6 and first == second
    return first


def test_two_sessions_on_two_layouts_are_one_run(tmp_path: Path, undisturbed: list[float]) -> None:
    first = config_of(tmp_path, "session-run", **DP2, tokens__train_steps=3)
    second = config_of(tmp_path, "session-run", **TP2)
    for found, (before, after) in spawned(two_layouts, first, second, dp=2):
        assert found == pytest.approx(undisturbed, rel=1e-5)
        assert found[:3] == undisturbed[:3]
        assert before == after
    steps = metrics(tmp_path, "session-run")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["consumed_tokens"] for row in steps] == [
        n * steps[0]["consumed_tokens"] for n in range(1, 7)
    ]


def test_a_session_opens_where_one_has_failed(tmp_path: Path, undisturbed: list[float]) -> None:
    first = config_of(tmp_path, "session-run", **PP2)
    second = config_of(tmp_path, "session-run", **TP2)
    ranks = spawned(after_a_failure, first, second, dp=2)
    for found, (before, failed, after, during) in ranks:
        assert found == pytest.approx(undisturbed[3:], rel=1e-5)  # its checkpoint is of step 3
        assert before == failed == after
        assert len(during[0]) > len(before[0]) and len(during[2]) > len(before[2])
    assert ranks[0][1][-1][1]  # rank 0 had files open


def test_a_session_begins_where_the_one_before_it_ended(tmp_path: Path) -> None:
    first = config_of(
        tmp_path,
        "session-run",
        tokens__train_steps=2,
        checkpoints__save_final_state="false",
        parallelism__dp=1,
    )
    second = config_of(tmp_path, "session-run", parallelism__dp=1)
    with pytest.raises(ValueError, match="session 2 begins after step 0, .* ended after step 2"):
        run(Mesh.connect(), first, then=(second,))
