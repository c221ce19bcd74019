"""Runs with ``dp: auto``: processes die, and the curve stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import launchers
import pytest
import runs
from test_train_crashes import own
from test_train_launch import TORCHRUN

from kenotron_ckpt import checkpoint
from kenotron_config import DEFAULT_CONFIG, load_config
from kenotron_dist import RankError
from kenotron_dist.testing import free_port
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.library import train
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.progress import Progress

STEPS, BATCH = 16, 7
QUIET = {
    "tokens.train_steps": STEPS, "tokens.global_batch_size": BATCH, "tokens.limit_val_batches": 0,
    "tokens.micro_batch_size": 1, "parallelism.dp": "auto", "checkpoints.checkpoint_interval": 4,
    "optimizer.learning_rate_scheduler.learning_rate": 1e-4,
    "optimizer.learning_rate_scheduler.min_decay_lr": 1e-5,
}  # fmt: skip


@dataclass
class Dies(LifeCycle):
    """Sends signals to ranks: after a step, in a world of so many ranks, to one of them."""

    plan: Sequence[tuple[int, int, int, signal.Signals]] = field(default_factory=list)

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Die, where it is time."""
        for step, world, rank, number in self.plan:
            mesh = training.mesh
            if (progress.step, mesh.config.world_size, mesh.rank) == (step, world, rank):
                os.kill(os.getpid(), number)


def config_of(folder: Path, **changes: object) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    values = {key.replace(".", "__"): value for key, value in QUIET.items()}
    flags = runs.arguments(folder, **(values | changes))
    return lambda ranks: load_config(DEFAULT_CONFIG, flags[1::2], world=ranks)


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "checkpoints/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trained(
    folder: Path,
    ranks: int,
    plan: Sequence[tuple[int, int, int, signal.Signals]] = (),
    hooks: Sequence[LifeCycle] = (),
    max_restarts: int = 0,
    **more: Any,
) -> list[dict[str, Any]]:
    """Train, and return the curve; lost processes are not replaced by default."""
    config = config_of(folder, **more)(ranks)
    given = {"stall_limit": timedelta(seconds=6), "max_restarts": max_restarts, "threads": 1}
    train(config, hooks=[Dies(plan), *hooks], ranks=ranks, **given)
    return curve(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Curves of one data rank to which nothing happens."""
    known: dict[str, list[dict[str, Any]]] = {}

    def curve_of(ranks: int = 1, **more: Any) -> list[dict[str, Any]]:
        if (name := repr(more)) not in known:
            known[name] = trained(tmp_path_factory.mktemp("one"), ranks, **more)
        return known[name]

    return curve_of


def check(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same steps, samples and losses."""
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["consumed_samples"] == theirs["consumed_samples"] == BATCH * ours["step"]
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def recoveries(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the steps after losses have of them."""
    return {each["step"]: each["recovery"] for each in found if "recovery" in each}


def test_ranks_are_killed_one_after_another(
    tmp_path: Path, undisturbed: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = [(6, 4, 1, signal.SIGKILL), (9, 3, 0, signal.SIGKILL), (15, 2, 0, signal.SIGSTOP)]
    begun = time.monotonic()
    found = trained(tmp_path, 4, plan)
    took = time.monotonic() - begun
    check(found, undisturbed())
    after = recoveries(found)
    assert sum(each["losses"] for each in after.values()) == 3
    assert [each["ranks"] for each in after.values()][-1] == 1
    assert {step % 4 for step in after} == {1}
    assert 0 < sum(each["lost_steps"] for each in after.values()) <= 6 + 9 + 15
    said = capfd.readouterr()  # of this process: ranks print elsewhere
    for rank, left in ((1, 3), (0, 2)):
        assert (
            f"rank {rank}: killed: died of SIGKILL; continuing with {left}: pp 1 x dp {left}"
            in (said.err)
        )
    assert "it waited for a rank that its report above names; continuing with 1: pp 1" in said.err
    phases = [each[f"{name}_s"] for each in after.values() for name in ("meeting", "loading")]
    assert all(0 < seconds < took for seconds in phases)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_the_reproducible_mode_not_a_bit_changes(
    dtype: str, tmp_path: Path, undisturbed: Callable
) -> None:
    """7 samples over 3, 2 and 1 ranks of 2 places each: padding is a leaf of zeros."""
    more = {
        "general__reproducible": "true", "tokens__micro_batch_size": 2, "model__dtype": dtype,
        "optimizer__optimizer_factory__torch_adam_is_fused": "false",
        "optimizer__accumulate_grad_in_fp32": "true", "optimizer__zero_stage": 2,
    }  # fmt: skip
    plan = [(6, 3, 1, signal.SIGKILL), (11, 2, 0, signal.SIGKILL)]
    found, expected = trained(tmp_path, 3, plan, **more), undisturbed(**more)
    for name in ("step", "lm_loss", "grad_norm", "consumed_samples"):
        assert [each[name] for each in found] == [each[name] for each in expected]
    assert sum(each["losses"] for each in recoveries(found).values()) == 2


def test_stages_and_cut_layers_stay_whole(tmp_path: Path, undisturbed: Callable) -> None:
    """Of five processes four train; when one of the world dies the idle one is not missed."""
    more = {"parallelism__tp": 2}
    found = trained(tmp_path, 5, [(6, 4, 3, signal.SIGKILL), (10, 4, 0, signal.SIGKILL)], **more)
    check(found, undisturbed(2, **more))
    after = recoveries(found).values()
    assert sum(each["losses"] for each in after) == 2 and [*after][-1]["ranks"] == 2


def test_too_few_processes_end_the_run(tmp_path: Path) -> None:
    plan = [(6, 2, 1, signal.SIGKILL)]
    with pytest.raises(RankError, match="rank 1: killed: died of SIGKILL") as error:
        trained(tmp_path, 2, plan, parallelism__tp=2)
    assert "1 processes are left, which are too few" in error.value.__notes__[-1]


def test_a_rank_that_fails_by_itself_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: TypeError") as error:
        trained(tmp_path, 2, [(3, 2, 0, "no signal")])  # type: ignore[list-item]
    assert "continuing with" not in str(error.value)
    assert curve(tmp_path)[-1]["step"] == 2


class OldWeights(LifeCycle):
    """Keeps rank 1 from reading the checkpoint: it has the weights of before."""

    def post_init(self, training: TrainingRun) -> None:
        """Replace the reading of this rank."""
        if training.mesh.rank == 1:
            checkpoint.fill_verified = lambda *_: []


def test_a_rank_that_joins_with_old_weights_ends_the_run(tmp_path: Path) -> None:
    trained(tmp_path, 1, tokens__train_steps=4)
    with pytest.raises(RankError, match=r"must be equal over dp_cp .* differ.*\(on rank 1\): were"):
        trained(tmp_path, 3, hooks=[OldWeights()])
    assert len(curve(tmp_path)) == 4  # no step was made


def test_a_fixed_dp_is_not_shrunk(tmp_path: Path) -> None:
    config = config_of(tmp_path, parallelism__dp=2, tokens__batch_accumulation_per_replica=4)(None)
    with pytest.raises(RankError, match="rank 1: killed"):
        train(config, hooks=[Dies([(2, 2, 1, signal.SIGKILL)])], threads=1)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--ranks", "2"), "--ranks 2: the config has 1 processes (pp 1 x dp 1 x tp 1); leave it"),
        (("--ranks", "2", "--set", "parallelism.dp=auto"), "dp: auto was given; then the batch"),
        (("--ranks", "0"), "--ranks: "),
        (("--max-restarts", "2"), "--max-restarts 2: the config has 1 processes (pp 1 x dp 1 x"),
        (("--max-restarts", "-1"), "--max-restarts: '-1' is no whole number from 0"),
    ],
)
def test_flags_that_do_not_fit_are_named(
    flags: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    done = runs.train(tmp_path, *runs.arguments(tmp_path), *flags)
    assert done.returncode and sentence in done.stderr


SLOW = """
import os, time

def sample(i):
    hosts, restarts = os.environ.get("WORLD_SIZE"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    time.sleep({("1", "0"): 0.15, ("2", "0"): 0.03}.get((hosts, restarts), 0))
"""
"""Slow until the second host has come, and slow enough to kill it."""
JOINABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torchrun (torch 2.13) waits forever where a host joins, if the first one stays the first."""
APART = """
import time
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
time.sleep(600)
"""
"""Serves the rendezvous in place of a host, so that any host may be lost."""
WORLDS = 30
"""Steps of the run that a host joins and leaves."""


def agent(
    folder: Path, flags: list[str], port: int, *conf: str, **more: str
) -> subprocess.Popen[str]:
    """One host of torchrun, with one process; it waits for others for a second."""
    limits = ("last_call_timeout=1", "keep_alive_interval=1", "keep_alive_max_attempt=3")
    meeting = ",".join((*limits, *conf))
    command = [
        *TORCHRUN, "1", "--nnodes", "1:2", "--max-restarts", "3", "--monitor-interval", "0.1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a-run",
        "--rdzv-conf", meeting, "script.py", *flags, "--stall-limit", "6",
    ]  # fmt: skip
    env = launchers.environment(KENOTRON_TEST=str(folder), **JOINABLE, **more)
    with (folder / f"said-{time.monotonic_ns()}").open("w") as file:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_served(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_a_host_joins_under_torchrun_and_the_first_one_is_lost(tmp_path: Path) -> None:
    """With rank 0, and the store of the ranks: the rendezvous is served elsewhere."""
    both = {"parallelism__dp": "auto", "tokens__global_batch_size": BATCH}
    both |= {"tokens__train_steps": WORLDS, "checkpoints__checkpoint_interval": 2}
    both |= {"tokens__limit_val_batches": 0}
    (tmp_path / "one").mkdir()
    alone = own(tmp_path / "one", SLOW, **both)
    done = runs.start(sys.executable, "script.py", *alone, cwd=tmp_path / "one")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "two"
    folder.mkdir()
    flags, port = own(folder, SLOW, **both), free_port()

    mark = f"KENOTRON_TEST={folder}"

    def said() -> str:
        return "\n".join(file.read_text() for file in sorted(folder.glob("said-*")))

    def stepped(step: int) -> bool:
        path = folder / "checkpoints/metrics.jsonl"
        return path.exists() and path.read_text().count("\n") >= step

    apart = subprocess.Popen([sys.executable, "-c", APART.format(port=port)])
    agents = []
    try:
        launchers.until(lambda: is_served(port), lambda: "no store", 60)
        agents.append(agent(folder, flags, port, "is_host=0"))
        launchers.until(lambda: stepped(4), said, 60)
        agents.append(agent(folder, flags, port, "is_host=0"))
        launchers.until(lambda: "pp 1 x dp 2 x" in said(), said, 60)
        begun = len(runs.metrics(folder))
        launchers.until(lambda: stepped(begun + 4), said, 60)
        ranks = [pid for pid in launchers.marked(mark) if parent(pid) == agents[0].pid]
        for pid in (agents[0].pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        agents[0].wait(10)
        assert agents[1].wait(90) == 0, said()
    finally:
        for pid in launchers.marked(mark):
            os.kill(pid, signal.SIGKILL)
        apart.kill()
        for each in (apart, *agents):
            each.wait(10)
    assert said().count("pp 1 x dp 1 x") >= 2 and said().count("pp 1 x dp 2 x") == 1
    found, expected = (runs.metrics(each) for each in (folder, tmp_path / "one"))
    assert [each["step"] for each in found] == list(range(1, WORLDS + 1))
    ((step, after),) = recoveries(found).items()
    assert (step % 2, after["losses"], after["ranks"]) == (1, 1, 1)
    assert after["lost_steps"] <= 2 and 0.1 < after["meeting_s"] < 90 > after["loading_s"] > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)


SLOW_HOST = f"""
import os
from kenotron_train.log import instrumentation

own = 900_000 if "SLOW_HOST" in os.environ else 100_000
instrumentation.microseconds = lambda times: (1_000_000 * bool(times.step), own, 0)
{SLOW}"""


def test_a_slow_host_leaves_torchrun(tmp_path: Path) -> None:
    """Its agent ends; the one that serves the rendezvous would stay."""
    keys = {"parallelism__dp": "auto", "parallelism__leave_out_slow": 3}
    keys |= {"tokens__global_batch_size": BATCH, "tokens__train_steps": WORLDS}
    keys |= {"tokens__limit_val_batches": 0, "checkpoints__checkpoint_interval": 100}
    flags, port = own(tmp_path, SLOW_HOST, **keys), free_port()
    agents = [agent(tmp_path, flags, port)]

    def said() -> str:
        return "\n".join(file.read_text() for file in sorted(tmp_path.glob("said-*")))

    def stepped() -> bool:
        path = tmp_path / "checkpoints/metrics.jsonl"
        return path.exists() and path.read_text().count("\n") > 0

    try:
        launchers.until(stepped, said, 60)
        agents.append(agent(tmp_path, flags, port, SLOW_HOST="1"))
        assert agents[1].wait(90) == 1, said()
        assert agents[0].wait(90) == 0, said()
    finally:
        for pid in launchers.marked(f"KENOTRON_TEST={tmp_path}"):
            os.kill(pid, signal.SIGKILL)
        for each in agents:
            each.wait(10)
    found = runs.metrics(tmp_path)
    assert [each["step"] for each in found] == list(range(1, WORLDS + 1))
    ((_, after),) = recoveries(found).items()
    assert (after["ranks"], after["lost_steps"]) == (1, 0)
    assert "0.1 s those of others, in each of 3 steps" in said()
    assert said().count("pp 1 x dp 2 x") == 1
