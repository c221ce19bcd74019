"""Runs of several hosts on one machine: ranks whose memory is in different folders."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kenotron_ckpt import file_moves
from kenotron_config import Config
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.progress import Progress
from kenotron_train.run.loop import run

VARIABLE = "MEMORY_OF_THIS_HOST"


@dataclass
class NoRoom(LifeCycle):
    """Lets a rank fail to write what others send it, after one step."""

    step: int
    rank: int

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Fail, where it is time."""
        write = file_moves._write

        def full(folder: Path, spans: Any, data: torch.Tensor) -> None:
            file_moves._write = write
            raise OSError(errno.ENOSPC, "No space left on device")

        if (progress.step, training.mesh.rank) == (self.step, self.rank):
            file_moves._write = full


@dataclass
class Lost(LifeCycle):
    """Kills ranks after a step, before its copy is made."""

    step: int
    ranks: Sequence[int]

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Die, where it is time."""
        if progress.step == self.step and training.mesh.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def train_on_hosts(
    config: Config, folders: Sequence[Path], hooks: Sequence[LifeCycle] = ()
) -> None:
    """Train with one rank for each of ``folders``: the memory of its host.

    ``checkpoints.memory_path`` must be ``$MEMORY_OF_THIS_HOST``.
    """
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
    sizes = config.parallelism
    on_ranks(
        _run, config, list(map(str, folders)), tuple(hooks),
        dp=sizes.dp, tp=sizes.tp, pp=sizes.pp, seconds=60,
    )  # fmt: skip


def _run(mesh: Mesh, config: Config, folders: Sequence[str], hooks: tuple[Any, ...]) -> None:
    os.environ[VARIABLE] = folders[mesh.rank]
    run(mesh, config, hooks=hooks)
