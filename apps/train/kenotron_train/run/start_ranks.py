"""Starting the ranks of a run: the tokens that they read are made first, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from kenotron_config import Config
from kenotron_cost import cost_plan, mesh_sizes
from kenotron_dist import Mesh, start
from kenotron_dist.launch import launcher
from kenotron_train.assemble import data_plan, plan_of
from kenotron_train.data.stage_dataset import check_folders, prepare
from kenotron_train.data.vocabulary import check_vocabulary
from kenotron_train.data_plan import DataPlan
from kenotron_train.failures.device_errors import device_errors
from kenotron_train.run.determinism import deterministic_algorithms

T = TypeVar("T")


def start_ranks(
    work: Callable[..., T],
    config: Config,
    limit: timedelta,
    *given: Any,
    leaves: bool = False,
    threads: int | None = None,
) -> T:
    """Call ``work(mesh, config, *given)`` on the ranks of the config's layout; see ``start``.

    ``limit`` is how long a rank may let others wait; ``leaves``: the process ends afterwards;
    ``threads``: how many each computes with on a CPU (None: an equal share of the cores). Where
    no program comes before the ranks, a launcher having started them, they make the tokens.
    """
    is_program = launcher() == "none"
    if is_program:  # and not one of many ranks
        data = data_plan(config)
        check_folders(data)
        _prepare(data)
    general = config.general
    wanted = general.reproducible_threads if general.reproducible else threads
    if threads not in (None, wanted):
        raise ValueError(
            f"--threads: {threads} was given; general.reproducible computes with "
            f"general.reproducible_threads ({wanted}): leave --threads out, or set the key"
        )
    plan = plan_of(config)
    # Both import the compiler: here once for all local ranks.
    compiler = ["torch._dynamo"] if plan.compile or {*plan.recompute} != {"none"} else []
    return start(
        _prepared,
        config,
        is_program,
        work,
        *given,
        config=mesh_sizes(config.parallelism),
        limit=limit,
        preload=(*compiler, work.__module__),
        device=None if general.device == "auto" else general.device,
        deterministic=general.is_deterministic(general.device),
        leaves=leaves,
        threads=wanted,
        secret_file=_secret_file(Path(config.checkpoints.checkpoints_path)),
    )


def _secret_file(run: Path) -> Path | None:
    """Return the path of the secret of launched ranks; None where the run's folder is read-only."""
    there = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    return run / ".job-secret" if os.access(there, os.W_OK) else None


def _prepared(
    mesh: Mesh, config: Config, is_prepared: bool, work: Callable[..., T], *given: Any
) -> T:
    if not is_prepared:
        with mesh.pulse.busy("making tokens"):  # one of each file system does; others wait
            _prepare(data_plan(config))
    general = config.general
    strict = general.is_deterministic(mesh.device.type)
    key = "deterministic" if general.deterministic else "reproducible"
    with device_errors(cost_plan(config), mesh), deterministic_algorithms(strict, key):
        return work(mesh, config, *given)


def _prepare(data: DataPlan) -> None:
    check_vocabulary(data)
    prepare(data)
