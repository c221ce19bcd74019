"""Programs in which one rank communicates what it should not, and what becomes of them.

A line that ends with ``# <fault>: others`` or ``# <fault>: one`` is what a message must name.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kenotron_dist import (
    Diverged,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    compare_collectives,
    from_env,
    receive,
    send,
    shutdown,
)


def line(mark):
    """Number of the line that ends with this mark."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return number


def skipped(axis, rest, bad):
    if not bad:
        all_reduce(torch.ones(4), axis)  # skipped: others
    all_gather(torch.ones(4), axis)  # skipped: one


def doubled(axis, rest, bad):
    for _ in range(2 if bad else 1):
        all_reduce(torch.ones(4), axis)  # doubled: one
    all_gather(torch.ones(4), axis)  # doubled: others


def mis_shaped(axis, rest, bad):
    if bad:
        all_reduce(torch.ones(3, 5), axis)  # mis_shaped: one
    else:
        all_reduce(torch.ones(3, 4), axis)  # mis_shaped: others


def mis_ordered(axis, rest, bad):
    if bad:
        all_gather(torch.ones(4), axis)  # mis_ordered: one
        all_reduce(torch.ones(4), axis)
    else:
        all_reduce(torch.ones(4), axis)  # mis_ordered: others
        all_gather(torch.ones(4), axis)


def wrong_dtype(axis, rest, bad):
    if bad:
        all_gather(torch.ones(4, dtype=torch.int32), axis)  # wrong_dtype: one
    else:
        all_gather(torch.ones(4), axis)  # wrong_dtype: others


def wrong_op(axis, rest, bad):
    if bad:
        all_reduce(torch.ones(4), axis, "min")  # wrong_op: one
    else:
        all_reduce(torch.ones(4), axis, "max")  # wrong_op: others


def wrong_source(axis, rest, bad):
    x = torch.ones(4)
    if bad:
        broadcast(x, axis, axis.rank)  # wrong_source: one
    else:
        broadcast(x, axis)  # wrong_source: others


def wrong_counts(axis, rest, bad):
    n = axis.size
    if bad:
        counts = [2, *[1] * (n - 1)]  # rank 0 expects one row
        all_to_all(torch.ones(n + 1, 2), axis, counts, [1] * n)  # wrong_counts: one
    else:
        all_to_all(torch.ones(n, 2), axis)  # wrong_counts: others


def wrong_transfer(axis, rest, bad):
    barrier(axis)
    if bad:
        send(torch.ones(5), axis, 0, tag=3).wait()  # wrong_transfer: one
    elif axis.rank == 0:
        source = rest["bad"]
        receive(torch.empty(4), axis, source, tag=3).wait()  # wrong_transfer: others
    barrier(axis)


def skipped_before_its_like(axis, rest, bad):
    if not bad:
        all_reduce(torch.ones(4), axis)  # skipped_before_its_like: others
    all_reduce(torch.ones(4), axis)  # skipped_before_its_like: one
    barrier(rest["axis"])


def doubled_at_the_end(axis, rest, bad):
    if bad:
        all_reduce(torch.ones(4), axis)  # doubled_at_the_end: one
    barrier(rest["axis"])  # doubled_at_the_end: others


def skipped_at_the_end(axis, rest, bad):
    all_gather(torch.ones(4), axis)  # skipped_at_the_end: one
    if not bad:
        all_reduce(torch.ones(4), axis)  # skipped_at_the_end: others


FAULTS = [
    skipped,
    doubled,
    mis_shaped,
    mis_ordered,
    wrong_dtype,
    wrong_op,
    wrong_source,
    wrong_counts,
    wrong_transfer,
    skipped_at_the_end,
    skipped_before_its_like,
    doubled_at_the_end,
]


def with_faults(mesh, bad, checked_by_torch):
    """What each fault made of this rank: its error, and after how many seconds."""
    if not checked_by_torch:
        dist.set_debug_level(dist.DebugLevel.OFF)
    found = {}
    for fault in FAULTS:
        fresh = Mesh.connect(tp=mesh.config.world_size)
        axis, rest = fresh.twin("tp"), {"axis": fresh.world, "bad": bad}
        began = time.monotonic()
        try:
            with compare_collectives(fresh):
                all_gather(torch.ones(2), axis)  # what is right is let through
                fault(axis, rest, mesh.rank == bad)
            text = ""
        except Diverged as error:
            text = str(error)
        found[fault.__name__] = text, time.monotonic() - began
    return found


def group_alone(mesh, bad, finishes):
    """What was raised where one rank asks for a group that the others do not ask for."""
    try:
        with compare_collectives(mesh):
            mesh["dp", "tp"]  # all of them ask for this one
            if mesh.rank == bad:
                mesh.twin("tp")  # group_alone: one
            if not finishes:
                barrier(mesh["tp"])  # group_alone: others
    except Diverged as error:
        return str(error)
    return ""


def calls_and_computes(mesh, seconds):
    """The last rank is late, and right: nothing but the watchdog's limit is against it."""
    all_reduce(torch.ones(4), mesh["tp"])  # too_late: one
    if mesh.rank == mesh.config.world_size - 1:
        time.sleep(seconds)
    all_gather(torch.ones(4), mesh["tp"])  # too_late: others


def finishes_early(mesh):
    """For KENOTRON_DEBUG: the last rank makes one communication less and is done."""
    for left in range(3):
        if left or mesh.rank < mesh.config.world_size - 1:
            all_reduce(torch.ones(4), mesh["tp"])  # finishes_early: others
    return "done"


def launched(rank, ports, folder):
    """The same as a program of a launcher, in a process of its own; what it raised is written."""
    os.environ["KENOTRON_DEBUG"] = "collectives"
    world = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports}
    from_env(world, timeout=timedelta(seconds=60))
    mesh = Mesh.connect(tp=2)
    try:
        finishes_early(mesh)
    except Diverged as error:
        Path(folder, "part").write_text(str(error))
        Path(folder, "part").rename(Path(folder, f"{rank}.txt"))
    shutdown()
