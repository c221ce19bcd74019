"""Processes that are started in place of lost ones, and join an elastic run at a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from kenotron_ckpt import CheckpointsConfig
from kenotron_config import Config, for_processes
from kenotron_dist import STALLED, Mesh, RankError, broadcast_object
from kenotron_train.log.report import Report
from kenotron_train.run.slow_ranks import SlowRank
from kenotron_train.run.stopping import STOPPED

MAX_RESTARTS = 3
"""Processes that are started in place of lost ones by default."""


class Joining(RuntimeError):
    """Processes join: all ranks begin again with the checkpoint that was just made."""


def admit(waiting: int, mesh: Mesh, report: Report, finish: Callable[[], bool]) -> None:
    """End a session where processes wait to join and the checkpoint of this step is complete.

    Collective over the mesh.

    Args:
        waiting: how many, the same on all ranks.
        mesh: of the run.
        report: takes the message.
        finish: waits for the save; returns whether the checkpoint is there.

    Raises:
        Joining: on all ranks.
    """
    if waiting and broadcast_object(finish(), mesh.world):
        text = f"{_count(waiting)} more at a checkpoint"
        report.say(f"{text}: all ranks begin again with it")
        raise Joining(text)


@dataclass(frozen=True)
class Restart:
    """Reason why ranks were started again."""

    reason: str
    losses: int
    """Processes that were lost."""
    joined: int = 0
    """Processes that were started in place of lost ones."""


class Processes:
    """Counts the processes of an elastic run: those that are there, lost, or replaced."""

    def __init__(self, config: Config, ranks: int, limit: int) -> None:
        """Begin with ``ranks`` processes; at most ``limit`` more are started after losses."""
        self.ranks = ranks
        """Processes that are there."""
        self._config, self._wanted, self._limit, self._left = config, ranks, limit, limit

    def after(self, error: RankError) -> Restart:
        """Return how the run continues after what ended its ranks; raises the error if it ends."""
        if error.kind == Joining.__name__ and not error.signal:
            return Restart(error.reason, 0, self._join())
        if error.kind == Joining.__name__:
            raise _stopped(error)
        if error.signal or not _is_lost(error):
            raise error
        is_slow = error.kind == SlowRank.__name__
        self.ranks -= 1
        self._wanted -= is_slow  # another process would be as slow
        reason = error.reason if is_slow else str(error)
        if not (problem := too_few(self._config, self.ranks)):
            return Restart(reason, 1)
        if joined := self._join():  # without waiting for a checkpoint
            return Restart(f"{reason}; {_count(joined)} more", 1, joined)
        there = f"{self.ranks} processes are left, which are too few: {problem}"
        error.add_note(there + self.described())
        raise error

    def config(self, checkpoints: CheckpointsConfig) -> Config:
        """Return the config of the processes that are there."""
        return replace(for_processes(self._config, self.ranks), checkpoints=checkpoints)

    def waiting(self) -> int:
        """Count the processes that join next; 0 where the layout has no place for them."""
        more = min(self._wanted - self.ranks, self._left)
        return more if self._world(self.ranks) < self._world(self.ranks + more) else 0

    def described(self) -> str:
        """Return which processes join, or why none does; empty where none was lost."""
        if waiting := self.waiting():
            return f"; {_count(waiting)} more at the next checkpoint"
        if self._wanted == self.ranks or self._left:
            return ""
        return f"; lost processes are no longer replaced: --max-restarts is {self._limit}"

    def _join(self) -> int:
        joined = self.waiting()
        self.ranks, self._left = self.ranks + joined, self._left - joined
        return joined

    def _world(self, ranks: int) -> int:
        """Return how many of so many processes take part; 0: they are too few."""
        return 0 if too_few(self._config, ranks) else for_processes(self._config, ranks).world_size


def too_few(config: Config, ranks: int) -> str:
    """Return why a number of processes is too small; empty: it is not."""
    try:
        for_processes(config, ranks)
    except ValueError as error:
        return str(error)
    return ""


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _is_lost(error: RankError) -> bool:
    """Return whether a process has died, hangs or is slow, which others may outlive."""
    if error.kind == SlowRank.__name__:
        return True
    return error.kind == "killed" or (error.kind == "exited" and error.code == STALLED)


def _stopped(error: RankError) -> RankError:
    """Return the error of a run that was asked to end when it had saved for processes to join."""
    name = signal.Signals(error.signal).name
    text = f"received {name} while processes joined at a checkpoint: the same command resumes it"
    return RankError(error.rank, "exited", text, code=STOPPED)
