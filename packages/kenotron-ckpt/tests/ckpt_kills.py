"""Programs that save and are killed at a step of it, each in a process of its own.

A nursery comes from the forkserver with everything loaded, and forks a child for every run: ten
milliseconds each. Nothing here imports pytest.
"""

import itertools
import multiprocessing
import os
import resource
import signal
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
from ckpt_cases import local, small

from kenotron_ckpt import Saver, save
from kenotron_ckpt.protocol import listen
from kenotron_dist import Mesh
from kenotron_dist.placement import Shard, TensorLayout

MANY = 40
"""Bytes of a file, where a rank is to have several: each row of ``w`` has 16."""
FULL = 700
"""Bytes that a file may have on the disk that is full: the shards fit, the manifest does not."""


def state_of(mesh, factor, blank=False):
    """Tensors whose values tell which save wrote them."""
    tensors = small(mesh, blank)
    layout = TensorLayout("half", (6, 5), (Shard("tp", 0),))
    tensors["half"] = (local(layout, torch.bfloat16, mesh, blank), layout)
    return {key: (tensor * factor, layout) for key, (tensor, layout) in tensors.items()}


def put(folder, step, factor, config=True, **options):
    mesh = Mesh.connect()
    text = f"factor: {factor}\n" if config else None
    save(folder, step, state_of(mesh, factor), mesh, {"factor": factor}, text, **options)


def put_beside(folder, steps, factor, mesh=None, **options):
    """Save ``steps`` in the background; the values change as soon as they may."""
    mesh = mesh or Mesh.connect()
    with Saver(folder, mesh, **options) as saver:
        for step in steps:
            tensors = state_of(mesh, factor)
            saver.save(step, tensors, {"factor": factor}, f"factor: {factor}\n")
            saver.wait()
            for tensor, _ in tensors.values():
                tensor.fill_(-1)


def nothing(folder):
    """No run was there before."""


def ten(folder):
    put(folder, 10, 1)


def ten_verified(folder):
    put(folder, 10, 1, verify=True)


def several(folder):
    """5 to be kept for ever, 7 the last that was verified, 8 and 9 to go; 9 was begun with."""
    put(folder, 5, 1, file_bytes=MANY)
    put(folder, 7, 1, verify=True)
    put(folder, 9, 1, config=False)
    put(folder, 8, 1, file_bytes=MANY)
    (folder / "9" / "manifest.json").replace(folder / "9" / "manifest.json.old.tmp")


def first_save(folder):
    put(folder, 10, 2)


def newer(folder):
    put(folder, 20, 2, verify=True)


def again(folder):
    put(folder, 10, 2, config=False)


def many_files(folder):
    put(folder, 20, 2, file_bytes=MANY)


def pruning(folder):
    put_beside(folder, [20], 2, keep=1, keep_every=5, threads=1)


def two_threads(folder):
    put_beside(folder, [20], 2, keep=1, pool_bytes=200, file_bytes=80, verify=True, threads=2)


def full_disk(folder):
    """The save fails, and clears up."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, hard))
    try:
        put(folder, 20, 2)
    except OSError:
        return
    raise AssertionError("the disk was not full")


SCENARIOS = {
    "first": (nothing, first_save, 10),
    "newer": (ten, newer, 20),
    "again": (ten_verified, again, 10),
    "many files": (ten, many_files, 20),
    "pruning": (several, pruning, 20),
    "two threads": (ten_verified, two_threads, 20),
    "full disk": (ten, full_disk, 20),
}
"""Name -> what is there before, the save, its step."""


def watch(log, at):
    """Write every step of every save to ``log``, and die at the one that ``at`` names or counts."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    lock, count = threading.Lock(), itertools.count()

    def note(step):
        with lock:
            os.write(handle, f"{step.name}\n".encode())
            if at in (next(count), step):
                os.kill(os.getpid(), signal.SIGKILL)

    listen(note)


def _child(name, folder, log, at):
    try:
        watch(log, at)
        SCENARIOS[name][1](folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _nurse(pipe):
    """Fork a child for every request; answer with how it ended."""
    torch.set_num_threads(1)
    while (request := pipe.recv()) is not None:
        if (child := os.fork()) == 0:
            _child(*request)
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@contextmanager
def nursery():
    """A function (scenario, folder, log, at) that runs a program in a child; its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "kenotron_dist", "kenotron_ckpt"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_nurse, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def run(name, folder, log, at=None):
        ours.send((name, Path(folder), str(log), at))
        return ours.recv()

    try:
        yield run
    finally:
        ours.send(None)
        process.join()
        ours.close()


def put_and_die(mesh, folder, victim, at, beside):
    """On several ranks: save step 20, and one rank dies at a step of it."""
    if mesh.rank == victim:
        watch(f"{folder}.log", at)
    if beside:
        put_beside(folder, [20], 2, mesh)
    else:
        save(folder, 20, state_of(mesh, 2), mesh, {"factor": 2}, "factor: 2\n")


def put_together(mesh, folder, step, factor, options):
    text = f"factor: {factor}\n"
    save(folder, step, state_of(mesh, factor), mesh, {"factor": factor}, text, **options)
