"""From a launcher's variables to a process group, and out again.

The only file that reads the environment, and only when its functions are called. A program starts
with ``from_env()`` and ends, whatever happened, with ``shutdown()``:

    try:
        main()
    finally:
        shutdown()
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kenotron_dist.cores import usable_cores
from kenotron_dist.cuda_variables import deterministic_variables, missing_variables
from kenotron_dist.device import choose_device, gpu_problem, register_backend, visible_gpus
from kenotron_dist.environment import World, check_tasks, resolve
from kenotron_dist.fake_world import FAKE_NCCL
from kenotron_dist.interfaces import check_interfaces, listen_locally
from kenotron_dist.job_secret import SECRET, agree, check_secret, derive, read_secret
from kenotron_dist.launch_store import check_backend, open_store
from kenotron_dist.rendezvous import SILENT, Meeting, leave_late
from kenotron_dist.run_nonce import fresh_key
from kenotron_dist.torchrun_arguments import torchrun_arguments

__all__ = [
    "COLLECTIVES",
    "compute_capability",
    "debugging",
    "from_env",
    "launcher",
    "local_ranks",
    "restarts",
    "tell_launcher",
    "threads_of_rank",
    "torchrun_arguments",
]

DEBUG = "KENOTRON_DEBUG"
"""The variable that asks for checks of a program. Its word ``fake_nccl`` gives ranks on the CPU
NCCL's semantics (module ``fake_nccl``)."""
COLLECTIVES = "collectives"
"""The word of ``KENOTRON_DEBUG`` that compares the calls of ranks."""
_KEY = "KENOTRON_MESSAGE_KEY"
"""The variable in which a rank keeps what signs its messages; ``from_env`` and ``spawn`` set it."""

MOST_THREADS = 4096
"""The most threads of a rank that may be asked for."""


def from_env(
    environ: Mapping[str, str] | None = None,
    *,
    device: str | None = None,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    meet: timedelta | None = None,
    deterministic: bool = False,
    secret_file: Path | None = None,
) -> World:
    """Join the world that the launcher describes: afterwards ``Mesh.connect`` works. Collective.

    Args:
        environ: the variables (default: this process's environment).
        device: ``cpu`` or ``cuda`` (default: cuda when there is a GPU for every local rank).
        backend: ``gloo`` or ``nccl`` (default: nccl on cuda).
        timeout: of an operation, and of the rendezvous if there is no ``meet``.
        meet: of the rendezvous: then missing ranks are named and the process ends (``STALLED``).
        deterministic: cuBLAS must give the same bits every time.
        secret_file: shared by all ranks, for a secret where ``KENOTRON_JOB_SECRET`` is not set.

    Messages are signed with the secret of the job and a nonce of this start. Ranks that are all on
    one host listen on its loopback interface only. On several hosts rank 0 issues a RuntimeWarning
    when the job has no secret. Without a launcher the world is this process alone. The store is
    this function's own, under a prefix of the restart count, so ``torchrun --max-restarts`` works.
    Elastic scale-up needs ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in the environment of torchrun
    itself, as it does not raise the count.

    Raises ValueError for variables that contradict one another or another rank's, for a missing
    device or backend, or when a group exists already; ConnectionError when the master's port is in
    use or the master cannot be reached.
    """
    if dist.is_initialized():
        raise ValueError("from_env: this process has a process group already: call it once")
    environ = os.environ if environ is None else environ
    world = resolve(environ)
    check_interfaces(environ if world.world_size > 1 else {})  # alone it listens nowhere
    set_cuda_variables(deterministic)
    gpus = visible_gpus()
    bound = world.launcher == "slurm" and "SLURM_GPUS_PER_TASK" in environ and gpus > 0
    needed = 1 if bound else world.local_world_size
    place, backend = choose_device(
        device, backend or debug_backend(debugging(environ)), gpus, needed, gpu_problem()
    )
    if place == "cuda":
        torch.accelerator.set_device_index(0 if bound else world.local_rank)
    with _answering(world, meet):
        store = open_store(world, meet or timeout, timeout)
        _share_secret(world, store, check_secret(environ.get(SECRET, "")), secret_file)
        check_backend(world, store, backend, gpus)
    if world.is_local:
        listen_locally(os.environ)
    register_backend(backend)
    with meeting("world", store, world, meet):
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout
        )
    if key := os.environ.get(_KEY):
        os.environ[_KEY] = fresh_key(world, store, key, (meet or timeout).total_seconds())
    return world


def meeting(
    name: str, store: dist.Store, world: World, limit: timedelta | None
) -> AbstractContextManager[object]:
    """Around what connects the ranks of a launched world: who is missing is named after ``limit``.

    The launcher is informed, too. Without a limit, or alone, nothing is watched.
    """
    if limit is None or world.world_size == 1:
        return contextlib.nullcontext()

    return Meeting(name, store, world.rank, world.world_size, limit, _give_up, signing_key())


def _give_up(text: str) -> None:
    tell_launcher(text)
    leave_late(text)


@contextlib.contextmanager
def _answering(world: World, limit: timedelta | None) -> Iterator[None]:
    """Around the first words with the store: one whose host is stopped blocks its callers."""
    if limit is None:
        yield
        return
    seconds = limit.total_seconds() + 1  # the store's own timeouts come first, with more detail
    where = f"{world.master_address}, port {world.master_port}"
    text = f"rank {world.rank} has waited {seconds:g} s for the store at {where}: {SILENT}"
    timer = threading.Timer(seconds, _give_up, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def launcher() -> str:
    """Return the launcher of this process: ``torchrun``, ``slurm``, ``mpi``, or ``none``.

    Raises ValueError for variables that contradict one another.
    """
    return resolve(os.environ).launcher


def check_launched(ranks: int) -> None:
    """Raise ValueError where a launcher has started one task for a mesh of several ranks."""
    check_tasks(resolve(os.environ), ranks)


def check_own_interfaces() -> None:
    """Raise ValueError where this process's environment names no interface of this host."""
    check_interfaces(os.environ)


def local_ranks(world_size: int) -> int:
    """Count those of ``world_size`` ranks that are on this host: all where no launcher is at work.

    Raises ValueError for variables that contradict one another.
    """
    world = resolve(os.environ)
    return world_size if world.launcher == "none" else world.local_world_size


def threads_of_rank(ranks: int, environ: Mapping[str, str] | None = None) -> int:
    """Threads with which each of the host's ``ranks`` computes on the CPU.

    ``OMP_NUM_THREADS``, else an equal share of the cores, at least one. Raises ValueError for a
    variable that is no number from 1 to ``MOST_THREADS``.
    """
    given = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "")
    if not given:
        return max(1, usable_cores() // ranks)
    first = given.partition(",")[0].strip()  # more are for nested regions
    if not first.isdecimal() or not 1 <= int(first[:20]) <= MOST_THREADS:
        raise ValueError(
            f"OMP_NUM_THREADS={given}: give a number from 1 to {MOST_THREADS}, or unset it"
        )
    return int(first)


def restarts() -> int:
    """Return how often the launcher has started this program again; 0 at the first start.

    torchrun counts restarts after failures, Slurm those of a job that was put back into the queue.
    """
    return resolve(os.environ).restart_count


def debugging(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return what ``KENOTRON_DEBUG`` asks for: ``collectives``, ``fake_nccl``, commas between.

    Raises ValueError for another word.
    """
    text = (os.environ if environ is None else environ).get(DEBUG, "")
    words = frozenset(filter(None, (word.strip() for word in text.split(","))))
    unknown = words - {COLLECTIVES, FAKE_NCCL}
    if unknown:
        raise ValueError(
            f"{DEBUG}={text}: {min(unknown)!r} is not known: set it to {COLLECTIVES} or "
            f"{FAKE_NCCL}, or unset it"
        )
    return words


def debug_backend(words: frozenset[str]) -> str | None:
    """Return the backend that ``KENOTRON_DEBUG`` asks for."""
    return FAKE_NCCL if FAKE_NCCL in words else None


def _share_secret(world: World, store: dist.Store, secret: str, file: Path | None) -> None:
    """Agree on the secret of the job, and keep what signs the messages of this start."""
    os.environ.pop(_KEY, None)
    if world.world_size > 1:
        file = None if secret else file
        secret = secret or (read_secret(file) if file is not None else "")
        agree(world, store, secret, file)
        if secret:
            os.environ[_KEY] = derive(secret, f"messages {world.restart_count}")


def inherit(debug: frozenset[str], key: str) -> None:
    """Prepare a local rank, whatever environment it came from.

    Args:
        debug: what its parent debugs.
        key: what signs its messages.
    """
    os.environ |= {DEBUG: ",".join(sorted(debug)), _KEY: key}
    listen_locally(os.environ)


def signing_key() -> bytes:
    """Return what signs messages between ranks; empty where the job has no secret."""
    return os.environ.get(_KEY, "").encode()


def tell_launcher(text: str, environ: Mapping[str, str] | None = None) -> None:
    """Let torchrun end its report with this failure; other launchers have no place for it.

    torchrun shows the cause that was written first, last on the console.
    """
    path = (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE")
    if path:
        when = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": when}}, file)


def set_cuda_variables(deterministic: bool = False) -> None:
    """Set what CUDA and cuBLAS shall find in this process's environment, before CUDA starts.

    Args:
        deterministic: whether cuBLAS must give the same bits every time.

    Raises:
        ValueError: the environment contradicts ``deterministic``.
    """
    more = deterministic_variables(os.environ) if deterministic else {}
    os.environ |= missing_variables(os.environ) | more


def pretend_host(rank: int) -> None:
    """Let NCCL take this process for the only one of its host: it refuses two on one GPU."""
    os.environ |= {
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def compute_capability() -> tuple[int, int]:
    """Return the compute capability of this process's GPU, such as (9, 0)."""
    return torch.cuda.get_device_capability()
