"""Run a function on local processes: no launcher, no port, the mesh ready.

Processes come from a forkserver that has torch loaded (0.1 s each instead of seconds) and meet
through a file. The first rank that fails ends all of them and its error is what the caller sees.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from kenotron_dist.device import choose_device, visible_gpus
from kenotron_dist.launch import debug_as, debugging, pretend_host
from kenotron_dist.leave import STALLED, leave
from kenotron_dist.meeting import Meeting
from kenotron_dist.mesh import Mesh, MeshConfig
from kenotron_dist.rank_error import RankError
from kenotron_dist.signals import SAVES, STOPS, handling, without_ctrl_c

_PATIENCE = 2.0
"""Seconds that a rank gets to leave by itself."""
_GRACE = 0.3
"""Seconds to look for a rank that died when another reports an error, which may come of it."""


class _Job(NamedTuple):
    call: bytes
    """The pickled function and arguments: multiprocessing would share the memory of tensors."""
    config: MeshConfig
    store: str
    timeout: timedelta
    meet: timedelta | None
    threads: int
    device: str | None
    share_gpus: bool
    forward: bool
    debugging: frozenset[str]


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    timeout: timedelta = timedelta(minutes=10),
    meet: timedelta | None = None,
    threads: int = 1,
    preload: Sequence[str] = (),
    device: str | None = "cpu",
    share_gpus: bool = False,
    forward: bool = False,
) -> list[Any]:
    """Call ``fn(mesh, *args)`` on ``pp * dp * cp * tp`` local processes.

    Arguments: an importable function, its arguments and results must pickle; ranks along each
    axis; how long an operation may wait for a peer; how long the ranks may take to meet before the
    one that is missing is named (``Meeting``; None: as long as an operation); torch threads in each
    process; modules to load before this program's first spawn, beside ``torch`` (tests gain from
    ``torch._dynamo``); ``cpu`` (gloo), ``cuda`` (nccl, a GPU each), or None: cuda when there are
    GPUs enough; whether several ranks may have one GPU, to try a layout on fewer GPUs than it needs
    (slow: NCCL then takes every rank for a host of its own, and talks through sockets); whether
    signals that ask for an end or a checkpoint (``signals``) are passed on to the ranks, which then
    decide: one that does not listen ends.

    Returns the results in rank order: copies, as the arguments are. Raises ValueError for a bad
    mesh or ``KENOTRON_DEBUG``, and RankError with the cause of the first rank that failed or died,
    after ending the others.
    """
    config = MeshConfig(pp=pp, dp=dp, cp=cp, tp=tp)
    small = {name: size for name, size in config.sizes.items() if size < 1}
    if small:
        raise ValueError(f"spawn: an axis has at least one rank, got {small}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "kenotron_dist", *preload])
    with tempfile.TemporaryDirectory(prefix="kenotron-") as folder:
        call, store = pickle.dumps((fn, args)), os.path.join(folder, "store")
        job = _Job(
            call, config, store, timeout, meet, threads, device, share_gpus, forward, debugging()
        )
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            with without_ctrl_c():
                for rank in range(config.world_size):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_main, args=(rank, job, theirs), daemon=True)
                    process.start()
                    theirs.close()
                    pipes.append(ours)
                    processes.append(process)
            if not forward:
                return _collect(pipes, processes)
            return _collect_and_forward(pipes, processes)
        finally:
            _end(pipes, processes)


def _collect_and_forward(pipes: list[Connection], processes: list[BaseProcess]) -> list[Any]:
    """``_collect`` while signals go to the ranks.

    Ranks that end of one are no failures: KeyboardInterrupt, or the error has the shell's code.
    """
    passed: list[int] = []

    def forward(number: int) -> None:
        passed.append(number)
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    with handling(forward):
        try:
            return _collect(pipes, processes)
        except RankError as error:
            ended = set(passed) & set(STOPS)
            if error.trace or not ended:
                raise
            if signal.SIGINT in ended:
                raise KeyboardInterrupt from None
            error.code = 128 + min(ended)
            raise


def _collect(pipes: list[Connection], processes: list[BaseProcess]) -> list[Any]:
    """Results of all ranks, or the first failure: a rank that died before those that missed it."""
    results: dict[int, Any] = {}
    failures: list[RankError] = []
    end = math.inf
    while len(results) < len(pipes) and all(error.trace for error in failures):
        left = end - time.monotonic()
        if left <= 0:
            break
        rest = [rank for rank in range(len(pipes)) if rank not in results]
        failures += _hear(rest, pipes, processes, results, left if failures else None)
        if failures:
            end = min(end, time.monotonic() + _GRACE)
    if failures:
        raise min(failures, key=lambda error: (bool(error.trace), error.rank))
    return [results[rank] for rank in range(len(pipes))]


def _hear(
    ranks: list[int],
    pipes: list[Connection],
    processes: list[BaseProcess],
    results: dict[int, Any],
    timeout: float | None,
) -> list[RankError]:
    """Add the results that are there to ``results``; return the failures."""
    ready = wait([pipes[rank] for rank in ranks], timeout)
    failures = []
    for rank in ranks:
        if pipes[rank] in ready:
            results[rank] = None
            try:
                results[rank] = _result(rank, pipes[rank], processes[rank])
            except RankError as error:
                failures.append(error)
    return failures


def _result(rank: int, pipe: Connection, process: BaseProcess) -> Any:
    try:
        failed, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(timeout=_PATIENCE)
        code = process.exitcode or 0
        if code < 0:
            raise RankError(rank, "killed", f"died of {signal.Signals(-code).name}") from None
        text = f"left with exit code {code} before it was done"
        if code == STALLED:
            text = f"gave up (exit code {code}): it waited for a rank that its report above names"
        raise RankError(rank, "exited", text, code=code or 1) from None
    if failed:
        raise RankError(rank, *value)
    return value


def _end(pipes: list[Connection], processes: list[BaseProcess]) -> None:
    """Closing its pipe ends a rank; one that does not go (stopped, or stuck) is killed."""
    for pipe in pipes:
        pipe.close()
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(timeout=max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()


def _main(rank: int, job: _Job, pipe: Connection) -> None:
    """Body of a local process. It stays until the parent has heard from all ranks.

    Were a rank to leave earlier, its peers would report a closed connection instead of the cause.
    """
    if job.forward:  # until the program listens, a signal that asks for an end is one
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(SAVES, signal.SIG_IGN)
    else:
        # Ctrl-C reaches all: the parent ends its ranks
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see without_ctrl_c
    threading.Thread(target=_leave_with_parent, args=(pipe,), daemon=True).start()
    with contextlib.suppress(OSError):  # the parent may have heard enough and closed the pipe
        pipe.send_bytes(_outcome(rank, job))
    threading.Event().wait()  # until the thread ends this process


def _outcome(rank: int, job: _Job) -> bytes:
    """What the parent hears, pickled: (False, result) or (True, description of the error)."""
    try:
        torch.set_num_threads(job.threads)
        fn, args = pickle.loads(job.call)
        mesh = _connect(rank, job)
        result = pickle.dumps((False, fn(mesh, *args)))
        mesh.pulse.close()
        return result
    except BaseException as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        told = (type(error).__name__, str(error), traceback.format_exc(), bases)
        return pickle.dumps((True, told))


def _connect(rank: int, job: _Job) -> Mesh:
    debug_as(job.debugging)
    world = job.config.world_size
    gpus = visible_gpus()
    shared = job.share_gpus and 0 < gpus < world
    device, backend = choose_device(job.device, None, world if shared else gpus, world)
    if device == "cuda":
        torch.accelerator.set_device_index(rank % gpus)
    if shared:
        pretend_host(rank)
    if not os.path.isdir(os.path.dirname(job.store)):  # FileStore would look for it for minutes,
        leave(0)  # and let no other thread of Python see that the parent is gone
    store = dist.FileStore(job.store, world)
    with _meeting(rank, job):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=job.timeout
        )
        grid = job.config
        return Mesh.connect(grid.pp, grid.dp, grid.cp, grid.tp, timeout=job.timeout)


def _meeting(rank: int, job: _Job) -> contextlib.AbstractContextManager[object]:
    world = job.config.world_size
    if job.meet is None or world == 1:
        return contextlib.nullcontext()
    # A file of its own: who waits at a FileStore keeps all others of its process from it.
    store = dist.FileStore(f"{job.store}-meeting", world)
    return Meeting("spawn", store, rank, world, job.meet)


def _leave_with_parent(pipe: Connection) -> NoReturn:
    """End this process as soon as the parent closes the pipe, or is gone."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    leave(0)
