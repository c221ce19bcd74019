"""One way to run a function on a mesh, under any launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kenotron_dist.diagnosis.hang_diagnosis import PeerLost
from kenotron_dist.diagnosis.watchdog import watch
from kenotron_dist.exit_process import STALLED
from kenotron_dist.launch import (
    MOST_THREADS,
    check_launched,
    from_env,
    launcher,
    meeting,
    threads_of_rank,
)
from kenotron_dist.mesh import Mesh, MeshConfig
from kenotron_dist.rank_error import RankError
from kenotron_dist.spawn import spawn

_BACKSTOP = timedelta(hours=1)
"""Delay of the backend's own timeout; saving may keep others waiting that long."""

_LEAST_MEETING = timedelta(seconds=30)
"""Ranks may need so long to meet on a busy machine, however short the limit is."""


def start(
    fn: Callable[..., Any],
    *args: Any,
    config: MeshConfig,
    limit: timedelta = timedelta(minutes=5),
    preload: Sequence[str] = (),
    device: str | None = None,
    deterministic: bool = False,
    leaves: bool = False,
    threads: int | None = None,
    secret_file: Path | None = None,
) -> Any:
    """Call ``fn(mesh, *args)`` on every rank of a mesh, under a watchdog; what it returned.

    Under torchrun, Slurm or MPI this process is one of the ranks; without a launcher
    ``config.world_size`` local processes are spawned, on GPUs if there are enough, and this one
    waits for them, returns the first one's result, and passes signals on (``signals``).

    Args:
        fn, args, config: an importable function and picklable arguments; the sizes of the mesh.
        limit: of a wait in one communication: then the rank that causes it is reported and the
            process ends with code ``STALLED`` (work under ``mesh.pulse.busy`` may take longer; the
            backend gives up an hour later). Also of the rendezvous (30 s at least).
        preload: further modules that local ranks need: they are loaded once for all.
        device: ``cpu``, ``cuda``, or None (cuda when there are GPUs enough).
        deterministic: cuBLAS must give the same bits every time.
        leaves: this process ends afterwards: signals are ignored once spawned ranks are done.
        threads: torch threads of each rank on the CPU (None: see ``threads_of_rank``).
        secret_file: see ``from_env``.

    On the CPU gloo's threads become batch threads (``let_gloo_threads_wait``), in ``spawn`` too.
    End the program with ``shutdown``. Raises what ``fn`` or ``from_env`` raises, ValueError for
    another number of launched processes or too many threads, RankError when a spawned rank failed.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"start: threads={threads}: give a number from 1 to {MOST_THREADS}")
    if launcher() == "none":
        return spawn(
            _watched,
            fn,
            args,
            limit,
            **vars(config),
            timeout=limit + _BACKSTOP,
            meet=max(limit, _LEAST_MEETING),
            preload=[*preload, *({fn.__module__} - {"__main__"})],
            device=device,
            deterministic=deterministic,
            threads=threads or threads_of_rank(config.world_size),
            forward=threading.current_thread() is threading.main_thread(),
            leaves=leaves,
        )[0]
    check_launched(config.world_size)
    meet = max(limit, _LEAST_MEETING)
    options = {"timeout": limit + _BACKSTOP, "meet": meet}
    world = from_env(device=device, deterministic=deterministic, secret_file=secret_file, **options)
    torch.set_num_threads(threads or threads_of_rank(world.local_world_size))
    with meeting("mesh", dist.distributed_c10d._get_default_store(), world, meet):
        mesh = Mesh.connect(**vars(config), batch_threads=True)
    return _watched(mesh, fn, args, limit)


def first_to_say(text: str) -> bool:
    """Return True on the first rank that reports ``text``, so that each error is printed once."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.add(f"kenotron-said/{text}", 1) == 1
    except RuntimeError:  # the store is gone: better twice than never
        return True


def explained(error: Exception, *known: type[Exception]) -> tuple[str, int] | None:
    """Return the message and the exit code for what ended a program on a mesh.

    Args:
        error: what ``start`` raised.
        known: errors whose message is enough, on the rank that raised one, too.

    Returns:
        For another error of a rank its traceback and code; for another one of this process None.
    """
    if isinstance(error, PeerLost):
        return str(error), STALLED
    if isinstance(error, RankError):
        is_known = error.is_any(*known, PeerLost) or not error.trace
        return str(error) if is_known else error.trace, error.code
    return (str(error), 1) if isinstance(error, known) else None


def first_cause(error: BaseException) -> str:
    """Name the rank that failed first, and its error: one text on all ranks and their parent."""
    if isinstance(error, RankError):
        kind, rank, reason = error.kind, error.rank, error.reason
    elif isinstance(error, PeerLost):
        cause = error.report.cause
        if cause.kind == "failed":
            return cause.reason
        return f"rank {cause.rank} was lost ({cause.kind})"
    else:
        kind, reason = type(error).__name__, str(error)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    first = reason.partition("\n")[0]
    return f"rank {rank} has ended ({kind}: {first})"


def _watched(mesh: Mesh, fn: Callable[..., Any], args: tuple[Any, ...], limit: timedelta) -> Any:
    with watch(mesh, limit=limit):
        return fn(mesh, *args)
