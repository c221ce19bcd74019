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
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from kenotron_dist.exit_process import STALLED
from kenotron_dist.launch import check_own_interfaces, debugging
from kenotron_dist.local_rank import LocalJob, pickled, run_rank
from kenotron_dist.mesh import MeshConfig
from kenotron_dist.parent_line import Counts
from kenotron_dist.rank_error import RankError
from kenotron_dist.signals import STOPS, handling, without_ctrl_c

_PATIENCE = 2.0
"""Seconds that a rank gets to leave by itself."""
GLOO_ABORTS = (
    "; gloo aborts where ranks meet with different operations or sizes: KENOTRON_DEBUG=collectives "
    "names both calls"
)
_GRACE = 0.3
"""Seconds to look for a rank that died when another reports an error, which may come of it."""


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    timeout: timedelta = timedelta(minutes=10),
    meet: timedelta | None = None,
    threads: int = 1,
    preload: Sequence[str] = (),
    device: str | None = "cpu",
    backend: str | None = None,
    share_gpus: bool = False,
    forward: bool = False,
    leaves: bool = False,
    deterministic: bool = False,
) -> list[Any]:
    """Call ``fn(mesh, *args)`` on ``pp * dp * cp * tp`` local processes.

    Args:
        fn, args: an importable function; its arguments and results must pickle.
        pp, dp, cp, tp, ep: ranks along each axis.
        timeout, meet: limit of an operation, and of the rendezvous (``Meeting``; None: the same).
        threads, preload: torch threads of each rank; modules to load once, before the first spawn.
        device: ``cpu`` (gloo), ``cuda`` (nccl, a GPU each), or None: cuda when GPUs are enough.
        backend, deterministic: another one (``fake_nccl``: NCCL on the CPU); same bits from cuBLAS.
        share_gpus: ranks may share a GPU (slow: NCCL takes every rank for a host of its own).
        forward: signals (``signals``) are passed to the ranks, which then decide (else they end).
        leaves: this process ends afterwards: signals are ignored once all ranks are done.

    Returns copies of the results in rank order. Raises ValueError for a bad mesh or
    ``KENOTRON_DEBUG``, TypeError for what does not pickle, RuntimeError in a rank of ``spawn``,
    RankError with the cause of the first rank that failed or died. A rank that waits for one that
    has returned fails after 2 seconds, in torch's own calls (``dist.barrier``) after ``timeout``.
    """
    _check(config := MeshConfig(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "kenotron_dist", *preload])
    pairs = [context.Pipe() for _ in range(config.world_size)]
    pipes, ends = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    processes: list[BaseProcess] = []
    handled = _signals_passed_on(processes, leaves) if forward else contextlib.nullcontext(_Done())
    with handled as done, tempfile.TemporaryDirectory(prefix="kenotron-") as folder:
        call = pickled((fn, args), "the function or an argument")
        job = LocalJob(
            call, config, os.path.join(folder, "store"), timeout, meet, threads, device, backend,
            share_gpus, forward, debugging(), deterministic, secrets.token_hex(32),
        )  # fmt: skip
        for rank, end in enumerate(ends):
            given = (rank, job, end)
            processes.append(context.Process(target=run_rank, args=given, daemon=True))
        try:
            _start(processes, ends)
            done.started = True
            done.results = _collect(pipes, processes)
        finally:
            _end(pipes, processes)
    return done.results


def _start(processes: Sequence[BaseProcess], ends: Sequence[Connection]) -> None:
    """Start the processes and close their ends of the pipes here; Ctrl-C interrupts this.

    The first one has to wait for the forkserver, which loads torch for seconds. So a thread starts
    them, from which all of them have Ctrl-C held back (``without_ctrl_c``), while this one waits.
    Where that is interrupted, a process that starts afterwards finds its pipe closed and ends.
    """
    failed: list[BaseException] = []
    done, given_up = threading.Event(), threading.Event()

    def start_all() -> None:
        try:
            for process, end in zip(processes, ends, strict=True):
                if not given_up.is_set():
                    process.start()
                end.close()
        except BaseException as error:
            failed.append(error)
        done.set()

    with without_ctrl_c():
        threading.Thread(target=start_all, name="kenotron-start", daemon=True).start()
    try:
        done.wait()
    except BaseException:
        given_up.set()
        raise
    if failed:
        raise failed[0]


def _check(config: MeshConfig) -> None:
    """Raise for a mesh without ranks, and where this process may start none."""
    small = {name: size for name, size in config.sizes.items() if size < 1}
    if small:
        raise ValueError(f"spawn: an axis has at least one rank, got {small}")
    _ = config.expert_sizes  # raises for ep
    if config.world_size > 1:
        check_own_interfaces()
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "spawn: this process is a rank of spawn, or another daemon process, and may start no "
            "processes: call the function with this rank's mesh, or spawn from the main program"
        )


@dataclass
class _Done:
    """Progress of a call of ``spawn``."""

    started: bool = False
    """True: all ranks were started, and take signals."""
    results: list[Any] = field(default_factory=list)
    """Those of all ranks."""


@contextlib.contextmanager
def _signals_passed_on(processes: list[BaseProcess], leaves: bool) -> Iterator[_Done]:
    """Pass signals on to the ranks until they have ended; then ignore them if ``leaves``.

    One that asks for an end before the ranks are there is an exception here, so that nothing is
    left behind. Ranks that end of one are no failures: KeyboardInterrupt, or the error has the
    shell's code.
    """
    done, passed, late = _Done(), list[int](), list[int]()

    def receive(number: int) -> None:
        if done.started:
            (late if done.results else passed).append(number)
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid or 0, number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number in STOPS:
            raise SystemExit(128 + number)

    with handling(receive, lambda: leaves and bool(done.results)):
        try:
            yield done
        except RankError as error:
            ended = set(passed) & set(STOPS)
            error.signal = min(ended, default=0)
            if error.trace or not ended:
                raise
            if signal.SIGINT in ended:
                raise KeyboardInterrupt from None
            error.code = 128 + min(ended)
            raise
    for number in () if leaves else late:
        os.kill(os.getpid(), number)


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
                results[rank], counts = _result(rank, pipes[rank], processes[rank])
                _tell_the_rest(rank, counts, pipes, results)
            except RankError as error:
                failures.append(error)
    return failures


def _tell_the_rest(
    rank: int, counts: Counts, pipes: list[Connection], results: dict[int, Any]
) -> None:
    """Inform ranks that still work that this one joins no further communication."""
    for other, pipe in enumerate(pipes):
        if other not in results:
            with contextlib.suppress(OSError):  # it has died, which is reported elsewhere
                pipe.send_bytes(pickle.dumps((rank, counts)))


def _result(rank: int, pipe: Connection, process: BaseProcess) -> tuple[Any, Counts]:
    try:
        outcome = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        process.join(timeout=_PATIENCE)
        code = process.exitcode or 0
        if code < 0:
            name = signal.Signals(-code).name
            hint = GLOO_ABORTS if name == "SIGABRT" else ""
            raise RankError(rank, "killed", f"died of {name}{hint}") from None
        text = f"left with exit code {code} before it was done"
        if code == STALLED:
            text = f"gave up (exit code {code}): it waited for a rank that its report above names"
        raise RankError(rank, "exited", text, code=code or 1) from None
    try:
        failed, value, *more = pickle.loads(outcome)
    except Exception as error:  # of many types
        text = (
            f"spawn: the result cannot be unpickled in the process that called spawn ({error}): "
            "return tensors, numbers, texts, or lists and dicts of them"
        )
        bases = tuple(base.__name__ for base in type(error).__mro__)
        raise RankError(rank, type(error).__name__, text, bases=bases) from error
    if failed:
        raise RankError(rank, *value)
    return value, more[0]


def _end(pipes: list[Connection], processes: list[BaseProcess]) -> None:
    """Closing its pipe ends a rank; one that does not go (stopped, or stuck) is killed."""
    for pipe in pipes:
        pipe.close()
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        if process.pid is None:  # it was not started
            continue
        process.join(timeout=max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()
