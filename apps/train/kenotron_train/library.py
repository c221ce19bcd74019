"""Training from a program of one's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from kenotron_config import Config
from kenotron_dist import Mesh
from kenotron_train.assemble import OwnModel
from kenotron_train.config_file import load_config
from kenotron_train.data.own_data import Hook, check_hook
from kenotron_train.failures.last_failure import latest_start, told
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.replay.replay import replay
from kenotron_train.run.elastic import with_those_left
from kenotron_train.run.loop import Outcome, run
from kenotron_train.run.start_ranks import start_ranks

T = TypeVar("T")


def train(
    config: Config | str | Path,
    *,
    model: OwnModel | None = None,
    loader: Hook | None = None,
    hooks: Sequence[LifeCycle] = (),
    stall_limit: timedelta = timedelta(minutes=5),
    time_limit: timedelta | None = None,
    threads: int | None = None,
    ranks: int | None = None,
    max_restarts: int | None = None,
) -> Outcome:
    """Train as ``python apps/train`` does; what its last steps reported, and why it stopped, if so.

    Args:
        config: a config or the path of a YAML file.
        model: the model's layers, see ``OwnModel`` (default: those of ``model.model_config``).
        loader: data for stages with ``dataset: null``, see ``own_data.Hook``.
        hooks: called at seven moments of the run, see ``LifeCycle``.
        stall_limit: how long a rank may let others wait.
        time_limit: of the run: before that it saves and stops, as it does on a signal.
        threads: CPU threads of each rank (default: ``OMP_NUM_THREADS``, else an equal share of the
            cores).
        ranks: local processes that ``parallelism.dp: auto`` follows; a run whose process dies
            continues with those that are left.
        max_restarts: processes that are started in place of lost ones, each at the next checkpoint
            (default: ``MAX_RESTARTS``).

    Without a launcher local processes are started: then all of it must be picklable, the hooks are
    copies, and the program must keep its start under ``if __name__ == "__main__"``. Under one, end
    the program with ``kenotron_dist.shutdown``. After a run that has ``stopped`` exit with
    ``STOPPED``: launchers then know that the same command resumes it.

    Raises what the run raises; RankError, which names the rank, where processes were started.
    """
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit.total_seconds()

    def begin(config: Config, more: tuple[LifeCycle, ...]) -> Outcome:
        given = (loader, model, (*hooks, *more), deadline)
        return start_ranks(_train, config, stall_limit, *given, threads=threads)

    return _start(begin, config, loader, ranks, max_restarts)


def replay_step(
    config: Config | str | Path,
    what: int | Path,
    *,
    model: OwnModel | None = None,
    loader: Hook | None = None,
    stall_limit: timedelta = timedelta(minutes=5),
) -> dict[str, Any]:
    """Make a step of a run of ``train`` again, as ``--replay-step`` does; what was found.

    Args:
        config, model, loader, stall_limit: as for ``train``.
        what: the number of the step, or the path of a record in ``nonfinite``.

    Raises what the replay raises, see ``replay``; RankError where processes were started.
    """

    def begin(config: Config, _: tuple[LifeCycle, ...]) -> dict[str, Any]:
        return start_ranks(replay, config, stall_limit, what, loader, model)

    return _start(begin, config, loader)


def _start(
    begin: Callable[[Config, tuple[LifeCycle, ...]], T],
    config: Config | str | Path,
    loader: Hook | None,
    ranks: int | None = None,
    max_restarts: int | None = None,
) -> T:
    """Do a piece of work on all ranks; a failure is recorded and sent to the launcher."""
    if not isinstance(config, Config):
        config = load_config(config, [], ranks)
    check_hook(config.data_stages, loader)
    folder = config.checkpoints.checkpoints_path
    before = latest_start(Path(folder))
    try:
        return with_those_left(begin, config, ranks, max_restarts)
    except Exception as error:
        if said := told(error, folder, before):
            error.add_note(said)
        raise


def _train(
    mesh: Mesh,
    config: Config,
    loader: Hook | None,
    model: OwnModel | None,
    hooks: tuple[LifeCycle, ...],
    deadline: float,
) -> Outcome:
    return run(mesh, config, loader=loader, model=model, hooks=hooks, deadline=deadline)
