"""Processes that are started in place of lost ones, and join at a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_train_elastic import check, config_of, recoveries, trained, undisturbed
from test_train_memory_copies import copies, in_memory

from kenotron_ckpt import Store, saving
from kenotron_config import Config
from kenotron_dist import STALLED, Mesh, RankError
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.progress import Progress
from kenotron_train.run.replacements import Joining, Processes
from kenotron_train.run.slow_ranks import SlowRank
from kenotron_train.run.stopping import STOPPED

__all__ = ["undisturbed"]  # a fixture
REPRODUCIBLE = {
    "general__reproducible": "true", "tokens__micro_batch_size": 2,
    "optimizer__optimizer_factory__torch_adam_is_fused": "false",
    "optimizer__accumulate_grad_in_fp32": "true", "optimizer__zero_stage": 2,
}  # fmt: skip


def log(folder: Path) -> str:
    return (folder / "checkpoints/log.txt").read_text()


def test_lost_processes_come_back_until_the_limit(
    tmp_path: Path, undisturbed: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    """With checkpoints on the disk every four steps, and not a bit of the curve changes."""
    plan = [(6, 3, 1, signal.SIGKILL), (10, 3, 0, signal.SIGKILL)]
    found = trained(tmp_path, 3, plan, max_restarts=1, **REPRODUCIBLE)
    expected = undisturbed(**REPRODUCIBLE)
    for name in ("step", "lm_loss", "grad_norm", "consumed_samples"):
        assert [each[name] for each in found] == [each[name] for each in expected]
    after = recoveries(found)
    what = {step: [each[k] for k in ("ranks", "losses", "joined")] for step, each in after.items()}
    assert what[5] == [2, 1, 0] and [*what] == [5, 9]
    assert what[9] == [2, 1, 1]  # what joined was lost before the next checkpoint
    assert after[9]["reason"] == "rank 0: killed: died of SIGKILL"
    said = capfd.readouterr().err
    for line in (
        "SIGKILL; continuing with 2: pp 1 x dp 2 x tp 1; 1 process more at the next checkpoint",
        "1 process more at a checkpoint; continuing with 3: pp 1 x dp 3 x tp 1\n",
        "continuing with 2: pp 1 x dp 2 x tp 1; lost processes are no longer replaced: --max-",
    ):
        assert said.count(line) == 1, said
    assert "1 process more at a checkpoint: all ranks begin again with it" in log(tmp_path)
    assert log(tmp_path).count(": rank 0: killed: died of SIGKILL") == 1


class NoRoom(LifeCycle):
    """Lets the copy of step 9 fail where there are two ranks."""

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Replace what commits, in this process."""
        commit = saving.commit_shares

        def failing(step_folder: Store, *more: Any) -> int:
            if step_folder.name == "9" and mesh.config.world_size == 2:
                raise OSError("no room")
            return commit(step_folder, *more)

        saving.commit_shares = failing


@pytest.mark.parametrize(("engine", "hooks"), [("torch", [NoRoom()]), ("datastates", [])])
def test_a_process_joins_at_a_copy_in_memory(
    engine: str, hooks: list[LifeCycle], tmp_path: Path, undisturbed: Callable
) -> None:
    """At the next one where it fails."""
    keys = in_memory(tmp_path, checkpoints__checkpointing_engine=engine)
    found = trained(tmp_path, 3, [(9, 3, 1, signal.SIGKILL)], hooks, 1, **keys)
    check(found, undisturbed())
    after = recoveries(found)
    assert [each["ranks"] for each in after.values()] == [2, 3]
    (lost, _), (joined, second) = after.items()
    assert joined == lost + 1 + len(hooks)
    assert [second[name] for name in ("losses", "joined", "lost_steps")] == [0, 1, 0]
    assert not copies(tmp_path)


class DiesAtStart(LifeCycle):
    """Ends the third rank of each start but the first, before it has loaded anything."""

    def __init__(self, first: Path) -> None:
        self._first = first

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Die, where there are three ranks again."""
        if mesh.rank == 2 and self._first.exists():
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_at_once_is_not_started_for_ever(
    tmp_path: Path, undisturbed: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = in_memory(tmp_path)
    hooks = [DiesAtStart(tmp_path / "checkpoints/metrics.jsonl")]
    plan = [(3, 3, 2, signal.SIGKILL)]
    found = trained(tmp_path, 3, plan, hooks, 2, **keys)
    check(found, undisturbed())
    said = capfd.readouterr().err
    assert said.count("continuing with 3") == 2 and said.count("continuing with 2") == 3
    assert said.count("no longer replaced: --max-restarts is 2") == 1
    assert {each["ranks"] for each in recoveries(found).values()} == {2}
    assert sum(each["joined"] for each in recoveries(found).values()) == 0


class DiesOnce(LifeCycle):
    """Ends a rank after step 6, the first time."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Die, where it is time."""
        if progress.step == 6 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_process_is_replaced_at_once(tmp_path: Path, undisturbed: Callable) -> None:
    found = trained(tmp_path, 1, hooks=[DiesOnce(tmp_path / "died")], max_restarts=1)
    check(found, undisturbed())
    ((step, after),) = recoveries(found).items()
    assert (step, after["ranks"], after["losses"], after["joined"]) == (5, 1, 1, 1)


def killed(rank: int = 1) -> RankError:
    return RankError(rank, "killed", "died of SIGKILL")


def joining() -> RankError:
    return RankError(0, Joining.__name__, "1 process more at a checkpoint", "trace")


def processes(folder: Path, ranks: int, limit: int, **more: Any) -> Processes:
    return Processes(config_of(folder, **more)(ranks), ranks, limit)


def test_processes_are_counted(tmp_path: Path) -> None:
    of_pairs = processes(tmp_path, 5, 3, parallelism__tp=2)
    of_pairs.after(killed())
    assert (of_pairs.ranks, of_pairs.waiting(), of_pairs.described()) == (4, 0, "")  # one was idle
    of_pairs.after(killed())
    assert (of_pairs.ranks, of_pairs.waiting()) == (3, 2)
    assert "; 2 processes more at the next" in of_pairs.described()
    assert of_pairs.after(joining()).joined == 2 and of_pairs.ranks == 5
    of_pairs.after(killed())
    of_pairs.after(RankError(0, "exited", "gave up", code=STALLED))
    assert of_pairs.after(joining()).joined == 1 and of_pairs.ranks == 4
    for limit in (3, 0):
        slow = processes(tmp_path, 3, limit)
        slow.after(RankError(1, SlowRank.__name__, "rank 1 is slow", "trace"))
        assert (slow.ranks, slow.waiting(), slow.described()) == (2, 0, "")
    few = processes(tmp_path, 2, 0, parallelism__tp=2)
    with pytest.raises(RankError, match="SIGKILL") as error:
        few.after(killed())
    assert "too few: " in error.value.__notes__[0] and "--max-restarts is 0" in str(
        error.value.__notes__
    )


@pytest.mark.parametrize(("error", "code"), [(killed(), 1), (joining(), STOPPED)])
def test_a_run_that_was_asked_to_end_starts_no_ranks(
    error: RankError, code: int, tmp_path: Path
) -> None:
    error.signal = signal.SIGTERM
    with pytest.raises(RankError) as found:
        processes(tmp_path, 3, 3).after(error)
    assert found.value.code == code
