"""The body of a process of ``spawn``: connect, call the function, send the outcome."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kenotron_dist.device import choose_device, gpu_problem, register_backend, visible_gpus
from kenotron_dist.exit_process import leave
from kenotron_dist.launch import (
    debug_backend,
    inherit,
    pretend_host,
    set_cuda_variables,
    signing_key,
)
from kenotron_dist.mesh import Mesh, MeshConfig
from kenotron_dist.parent_line import ParentLine, failure, success
from kenotron_dist.rendezvous import Meeting
from kenotron_dist.signals import SAVES


class LocalJob(NamedTuple):
    """The work of a local process; ``spawn`` describes the fields."""

    call: bytes
    """The pickled function and arguments: multiprocessing would share the memory of tensors."""
    config: MeshConfig
    store: str
    timeout: timedelta
    meet: timedelta | None
    threads: int
    device: str | None
    backend: str | None
    share_gpus: bool
    forward: bool
    debugging: frozenset[str]
    deterministic: bool
    key: str
    """Key that signs messages between these ranks."""


def run_rank(rank: int, job: LocalJob, pipe: Connection) -> None:
    """Body of a local process. It stays until the parent has a result of all ranks.

    Were a rank to leave earlier, its peers would report a closed connection instead of the cause.
    """
    if job.forward:  # until the program listens, a signal that asks for an end is one
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(SAVES, signal.SIG_IGN)
    else:
        # Ctrl-C reaches all: the parent ends its ranks
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see without_ctrl_c
    line = ParentLine(pipe)
    line.send(_outcome(rank, job, line))
    threading.Event().wait()  # until the line ends this process


def _outcome(rank: int, job: LocalJob, line: ParentLine) -> bytes:
    """The message to the parent, pickled."""
    try:
        torch.set_num_threads(job.threads)
        fn, args = pickle.loads(job.call)
        mesh = _connect(rank, job)
        line.pulse = mesh.pulse
        return pickled(success(fn(mesh, *args), mesh.pulse), "the result")
    except BaseException as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return failure(type(error).__name__, str(error), traceback.format_exc(), bases)


def pickled(value: Any, what: str) -> bytes:
    """Pickle a value; the words of Python's own errors differ between its versions."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # of many types
        message = f"spawn: {what} cannot be pickled ({error}): use what a module has by name"
        raise TypeError(message) from error


def _connect(rank: int, job: LocalJob) -> Mesh:
    inherit(job.debugging, job.key)
    set_cuda_variables(job.deterministic)
    world, gpus = job.config.world_size, visible_gpus()
    shared = job.share_gpus and 0 < gpus < world
    wanted = job.backend or debug_backend(job.debugging)
    there = world if shared else gpus
    device, backend = choose_device(job.device, wanted, there, world, gpu_problem())
    if device == "cuda":
        torch.accelerator.set_device_index(rank % gpus)
    if shared:
        pretend_host(rank)
    if not os.path.isdir(os.path.dirname(job.store)):  # FileStore would look for it for minutes,
        leave(0)  # and let no other thread of Python see that the parent is gone
    store = dist.FileStore(job.store, world)
    register_backend(backend)
    with _meeting(rank, job):
        options = {"store": store, "rank": rank, "world_size": world, "timeout": job.timeout}
        dist.init_process_group(backend, **options)
        return Mesh.connect(**vars(job.config), timeout=job.timeout, batch_threads=True)


def _meeting(rank: int, job: LocalJob) -> contextlib.AbstractContextManager[object]:
    world = job.config.world_size
    if job.meet is None or world == 1:
        return contextlib.nullcontext()
    # A file of its own: who waits at a FileStore keeps all others of its process from it.
    store = dist.FileStore(f"{job.store}-meeting", world)
    return Meeting("spawn", store, rank, world, job.meet, key=signing_key())
