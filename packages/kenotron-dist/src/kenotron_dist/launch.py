"""From a launcher's variables to a process group, and out again.

The only file that reads the environment, and only when its functions are called. A program starts
with ``from_env()`` and ends, whatever happened, with ``shutdown()``::

    try:
        main()
    finally:
        shutdown()
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from kenotron_dist.device import choose_device, visible_gpus
from kenotron_dist.environment import World, resolve
from kenotron_dist.leave import leave
from kenotron_dist.meeting import SILENT, Meeting, leave_late

DEBUG, COLLECTIVES = "KENOTRON_DEBUG", "collectives"
"""The variable that asks for checks of a program, and its word for comparing ranks."""
ENDED = "kenotron-ended"
"""Prefix in the store of the ranks that have finished, told where ranks are compared."""
_FAREWELL_SECONDS = 10.0
"""How long a rank that is done waits for the others to be done too."""


def from_env(
    environ: Mapping[str, str] | None = None,
    *,
    device: str | None = None,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    meet: timedelta | None = None,
) -> World:
    """Join the world that the launcher describes: afterwards ``Mesh.connect`` works. Collective.

    Arguments: the variables (default: this process's environment); ``cpu`` or ``cuda`` (default:
    ``cuda`` when there is a GPU for every local rank); ``gloo`` or ``nccl`` (default: nccl on
    cuda); how long to wait for the other ranks here, and later in an operation; another time for
    here, after which the ranks that are missing are named and this process ends with code
    ``STALLED``. Without a launcher the world is this process alone.

    The store is this function's own, under a prefix of the restart count, so ``torchrun
    --max-restarts`` works. Elastic scale-up does not raise the count: it needs
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in the environment of torchrun itself.

    Raises ValueError for variables that contradict one another or another rank's, for a device or
    backend that is not there, and when a group exists already; ConnectionError when the master's
    port is in use or the master cannot be reached.
    """
    if dist.is_initialized():
        raise ValueError("from_env: this process has a process group already: call it once")
    environ = os.environ if environ is None else environ
    world = resolve(environ)
    gpus = visible_gpus()
    bound = world.launcher == "slurm" and "SLURM_GPUS_PER_TASK" in environ and gpus > 0
    needed = 1 if bound else world.local_world_size
    place, backend = choose_device(device, backend, gpus, needed)
    if place == "cuda":
        torch.accelerator.set_device_index(0 if bound else world.local_rank)
    with _answering(world, meet):
        store = _store(world, meet or timeout, timeout)
        _check_backend(world, store, backend, gpus)
    with meeting("world", store, world, meet):
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout
        )
    return world


def meeting(
    name: str, store: dist.Store, world: World, limit: timedelta | None
) -> AbstractContextManager[object]:
    """Around what connects the ranks of a launched world: who is missing is named after ``limit``.

    The launcher is told, too. Without a limit, or alone, nothing is watched.
    """
    if limit is None or world.world_size == 1:
        return contextlib.nullcontext()

    return Meeting(name, store, world.rank, world.world_size, limit, _give_up)


def _give_up(text: str) -> None:
    tell_launcher(text)
    leave_late(text)


@contextlib.contextmanager
def _answering(world: World, limit: timedelta | None) -> Iterator[None]:
    """Around the first words with the store: one whose host is stopped blocks its callers."""
    if limit is None:
        yield
        return
    seconds = limit.total_seconds() + 1  # the store's own timeouts come first, and say more
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
    """Who started this process: ``torchrun``, ``slurm``, ``mpi``, or ``none``.

    Raises ValueError for variables that contradict one another.
    """
    return resolve(os.environ).launcher


def local_ranks(world_size: int) -> int:
    """How many of ``world_size`` ranks are on this host; all of them where no launcher is at work.

    Raises ValueError for variables that contradict one another.
    """
    world = resolve(os.environ)
    return world_size if world.launcher == "none" else world.local_world_size


def restarts() -> int:
    """How often the launcher has started this program again; 0 at the first start.

    torchrun counts restarts after failures, Slurm those of a job that was put back into the queue.
    """
    return resolve(os.environ).restart_count


def debugging(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """What ``KENOTRON_DEBUG`` asks for: words with commas between; ``collectives`` is the only one.

    Raises ValueError for another word.
    """
    text = (os.environ if environ is None else environ).get(DEBUG, "")
    words = frozenset(filter(None, (word.strip() for word in text.split(","))))
    if words - {COLLECTIVES}:
        raise ValueError(
            f"{DEBUG}={text}: {min(words - {COLLECTIVES})!r} is not known: set it to "
            f"{COLLECTIVES}, or unset it"
        )
    return words


def debug_as(words: frozenset[str]) -> None:
    """Let this process debug what its parent does, whatever the environment it came from."""
    os.environ[DEBUG] = ",".join(sorted(words))


def tell_launcher(text: str, environ: Mapping[str, str] | None = None) -> None:
    """Let torchrun end its report with this failure; other launchers have no place for it.

    torchrun shows the cause that was written first, last on the console.
    """
    path = (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE")
    if path:
        when = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": when}}, file)


def shutdown(code: int = 0) -> NoReturn:
    """Leave the world and end this process with ``code``: the one way out for every program.

    In a ``finally`` it sees the exception that is on its way: it writes the traceback, and a code
    of 0 becomes 1 (or that of a SystemExit).

    A rank that succeeded first waits up to 10 seconds until all are done, for the last messages
    and the store must outlive their readers. The process then ends without Python's finalisation,
    in which gloo aborts: close files and trackers before; ``atexit`` functions do not run. A
    process that joined no world (it spawned its ranks) ends by SystemExit, the usual way.
    """
    code = code or _code_of(sys.exc_info()[1])
    if not (dist.is_available() and dist.is_initialized()):
        raise SystemExit(code)  # no backend thread to fear, and finalisers clean up
    if code == 0 and dist.get_world_size() > 1:
        _farewell(dist.get_world_size())
    with contextlib.suppress(RuntimeError):  # a group that has failed
        dist.destroy_process_group()
    gc.collect()
    leave(code)


def _code_of(error: BaseException | None) -> int:
    """The exit code that Python would give; a traceback is written as Python would."""
    if error is None or (isinstance(error, SystemExit) and error.code is None):
        return 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, SystemExit):
        sys.stderr.write(f"{error.code}\n")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _farewell(size: int) -> None:
    end = time.monotonic() + _FAREWELL_SECONDS
    with contextlib.suppress(RuntimeError):  # its host is gone: then all are done
        store = dist.distributed_c10d._get_default_store()
        if debugging():
            store.set(f"{ENDED}/{dist.get_rank()}", "")
        done = store.add("kenotron-farewell", 1)
        while done < size and time.monotonic() < end:
            time.sleep(0.02)
            done = store.add("kenotron-farewell", 0)


def _store(world: World, meet: timedelta, timeout: timedelta) -> dist.Store:
    if world.world_size == 1:
        return dist.HashStore()
    tcp = _tcp_store(world, meet)
    tcp.set_timeout(timeout)
    store = dist.PrefixStore(f"kenotron/{world.restart_count}", tcp)
    _check_owner(world, store)
    size = store.compare_set("world-size", "", str(world.world_size)).decode()
    if size != str(world.world_size):
        raise ValueError(
            f"rank {world.rank} was started in a world of {world.world_size} ranks, another one "
            f"in a world of {size}: start all of them with the same number"
        )
    return store


def _tcp_store(world: World, timeout: timedelta) -> dist.TCPStore:
    address, port = world.master_address, world.master_port
    hosts = world.rank == 0 and not world.agent_store
    try:
        return dist.TCPStore(
            address, port, is_master=hosts, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        if hosts and "EADDRINUSE" in str(error):
            raise ConnectionError(
                f"rank 0 cannot open port {port}, which is in use on {address}: set MASTER_PORT "
                "to a free port, the same on all ranks"
            ) from error
        raise ConnectionError(
            f"rank {world.rank} cannot reach the store at {address}, port {port}, within "
            f"{timeout.total_seconds():g} s: see that rank 0 runs there and that MASTER_ADDR and "
            "MASTER_PORT are the same on all ranks and open between the hosts"
        ) from error


def _check_backend(world: World, store: dist.Store, backend: str, gpus: int) -> None:
    """Refuse ranks that would talk past one another: a host with too few GPUs chose the CPU."""
    own = f"{backend}, chosen on {socket.gethostname()} with {gpus} GPUs"
    own += f" for {world.local_world_size} ranks"
    first = store.compare_set("backend", "", own).decode()
    if first.partition(",")[0] != backend:
        raise ValueError(
            f"rank {world.rank} would talk over {own}, and another rank over {first}: each rank of "
            "each host needs a GPU, or none may see any (CUDA_VISIBLE_DEVICES=)"
        )


def _check_owner(world: World, store: dist.Store) -> None:
    """Every rank signs; a rank signed by another process is a stale store or a double rank."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    owner = store.compare_set(f"owner/{world.rank}", "", me).decode()
    if owner != me:
        raise ValueError(
            f"rank {world.rank} is taken by {owner}, and {me} claims it too: two processes were "
            "given one rank, or torchrun changed the number of ranks without a restart count "
            "(set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it starts)"
        )


def pretend_host(rank: int) -> None:
    """Let NCCL take this process for the only one of its host: it refuses two on one GPU."""
    os.environ |= {
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
