"""Starting the ranks of a run: the tokens that they read are made first, once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from kenotron_dist import Mesh, MeshConfig, start
from kenotron_dist.launch import launcher
from kenotron_train.config import Config
from kenotron_train.corpus import prepare
from kenotron_train.loop import LOADED_ONCE
from kenotron_train.vocabulary import check_vocabulary

T = TypeVar("T")


def start_ranks(work: Callable[..., T], config: Config, limit: timedelta, *given: Any) -> T:
    """Call ``work(mesh, config, *given)`` on the ranks of the config's layout; see ``start``.

    ``limit`` is how long a rank may let others wait. Where no program comes before the ranks, a
    launcher having started them, they make the tokens themselves.
    """
    is_program = launcher() == "none"
    if is_program:  # and not one of many ranks
        _prepare(config)
    sizes = config.parallelism
    return start(
        _prepared,
        config,
        is_program,
        work,
        *given,
        config=MeshConfig(pp=sizes.pp, dp=sizes.dp, tp=sizes.tp),
        limit=limit,
        preload=(*LOADED_ONCE, work.__module__),
    )


def _prepared(
    mesh: Mesh, config: Config, is_prepared: bool, work: Callable[..., T], *given: Any
) -> T:
    if not is_prepared:
        with mesh.pulse.busy("making tokens"):  # one of each file system does; others wait
            _prepare(config)
    return work(mesh, config, *given)


def _prepare(config: Config) -> None:
    check_vocabulary(config)
    prepare(config)
