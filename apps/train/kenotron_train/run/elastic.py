"""A run that continues with the processes that are left (``parallelism.dp: auto``).

Without a launcher this program starts the ranks, starts fewer when one dies, and all of them again
at the next checkpoint. Under a launcher that starts the job again, dp follows the processes of the
new start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from kenotron_config import Config
from kenotron_dist import Mesh, RankError, broadcast_object
from kenotron_dist.launch import launcher, local_ranks, restarts
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.log.metrics_file import RECOVERY, RECOVERY_SECONDS, read_journal
from kenotron_train.log.printing import say, warn
from kenotron_train.log.rank_times import RankTimes
from kenotron_train.log.report import Report
from kenotron_train.progress import Progress
from kenotron_train.run.replacements import MAX_RESTARTS, Processes, Restart, too_few
from kenotron_train.run.set_back import SetBack
from kenotron_train.run.slow_ranks import SlowRanks
from kenotron_train.run.torchrun_agent import end_agent, why_host_stays

T = TypeVar("T")


class Recovery(LifeCycle):
    """Measures the seconds from the end of the former ranks to the next step, and what is lost."""

    def __init__(
        self, ended: float | None = None, restart: Restart | None = None, waiting: int = 0
    ) -> None:
        """Begin to measure.

        Args:
            ended: of ``time.time``, when the former ranks had ended. None: the last time that they
                wrote to metrics.jsonl, after their last step.
            restart: why they ended; None: a launcher started these, after a loss.
            waiting: processes that join once these ranks have made a checkpoint.
        """
        self._ended, self._times, self._before = ended, list[float](), list[dict]()
        self.restart, self.waiting = restart or Restart("", losses=1), waiting

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """The ranks have met; lines of metrics.jsonl are still those of the former ranks."""
        now, path = time.time(), Path(config.checkpoints.checkpoints_path) / "metrics.jsonl"
        with contextlib.suppress(OSError):
            if self._ended is None:
                self._ended = min(path.stat().st_mtime, now)
            if mesh.rank == 0:
                self._before = read_journal(path)
        self._times = [now if self._ended is None else self._ended, now]

    def pre_training(self, training: TrainingRun, progress: Progress) -> None:
        """The checkpoint is loaded."""
        self._times.append(time.time())

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Report the first step, where the former ranks had made one."""
        if len(self._times) == 4 or self._ended is None:
            return
        self._times.append(time.time())
        undone = [each for each in self._before if each["step"] >= progress.step]
        # Of losses whose lines are cut off, too.
        former = [each[RECOVERY] for each in undone if RECOVERY in each]
        met, loaded, stepped = (b - a for a, b in zip(self._times, self._times[1:], strict=False))
        lost = sum(each.get("step_time_s") or 0.0 for each in undone)
        lost += sum(each[name] for each in former for name in RECOVERY_SECONDS)
        result.figures[RECOVERY] = {
            "losses": self.restart.losses + sum(each["losses"] for each in former),
            "joined": self.restart.joined + sum(each.get("joined", 0) for each in former),
            "ranks": training.mesh.config.world_size,
            "lost_steps": len(undone) + sum(each["lost_steps"] for each in former),
            "lost_s": lost,
            "meeting_s": met,
            "loading_s": loaded,
            "reason": self.restart.reason,
        }
        if training.mesh.rank == 0:
            say(
                f"Resumed with step {progress.step} after {met + loaded + stepped:.1f} s: ranks "
                f"met {met:.1f}, model and checkpoint {loaded:.1f}, step {stepped:.1f}; "
                f"{len(undone)} steps are repeated"
            )


def with_those_left(
    start: Callable[[Config, tuple[LifeCycle, ...]], T],
    config: Config,
    ranks: int | None,
    max_restarts: int | None = None,
) -> T:
    """Start a run; with one process less after each that dies; with a new one at a checkpoint.

    Args:
        start: runs a config on its ranks, with further hooks.
        config: that of ``ranks`` processes.
        ranks: processes to begin with (None: those of the config).
        max_restarts: processes that are started in place of lost ones, in all; None:
            ``MAX_RESTARTS``.

    Raises:
        RankError: a rank failed by itself, too few processes are left, or a signal had asked for
            an end.
    """
    begun = SetBack(config.checkpoints)
    hooks: tuple[LifeCycle, ...] = (Recovery(),) if restarts() else ()
    limit = MAX_RESTARTS if max_restarts is None else max_restarts
    processes = Processes(config, ranks or config.world_size, limit)
    while True:
        try:
            return start(config, hooks)
        except RankError as error:
            if not config.parallelism.dp_auto or launcher() != "none":
                raise
            restart = processes.after(error)
        config = processes.config(begun.after_a_loss(config.checkpoints))
        hooks = (Recovery(time.time(), restart, processes.waiting()),)
        about = f"{config.parallelism.described}{processes.described()}"
        warn(f"{restart.reason}; continuing with {processes.ranks}: {about}")


def waiting(hooks: Sequence[LifeCycle], report: Report) -> int:
    """Report why these ranks were started; return how many processes join at a checkpoint."""
    recoveries = [hook for hook in hooks if isinstance(hook, Recovery)]
    for each in recoveries:
        report.say(each.restart.reason)
    return sum(each.waiting for each in recoveries)


def slow_ranks_of(config: Config, mesh: Mesh, times: RankTimes, report: Report) -> SlowRanks:
    """Return what leaves out, or names, ranks of a run that are slow."""

    def leave(rank: int) -> None:
        if launcher() != "none" and rank == mesh.rank:
            end_agent()

    needs = partial(_needs_rank, config, mesh)
    return SlowRanks(config.parallelism.leave_out_slow, times, report, needs, leave)


def _needs_rank(config: Config, mesh: Mesh, rank: int) -> str:
    """Return why a run cannot continue without a rank, and under a launcher without its host.

    Empty where it can. Collective over the mesh under a launcher: the rank itself finds out.
    """
    if launcher() == "none":
        return too_few(config, config.world_size - 1)

    def find() -> str:
        return why_host_stays() or too_few(config, config.world_size - local_ranks(1))

    return broadcast_object(find() if rank == mesh.rank else "", mesh.world, rank)
