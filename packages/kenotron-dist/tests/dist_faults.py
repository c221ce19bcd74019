"""Programs in which one rank communicates what it should not, and what becomes of them.

A line that ends with ``# <fault>: others`` or ``# <fault>: one`` is what a message must name.
"""

import time
from pathlib import Path

import torch

from kenotron_dist import all_gather, all_reduce, all_to_all, barrier, broadcast, receive, send
from kenotron_dist.diagnosis import compare_collectives, record


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


MET = [
    skipped,
    doubled,
    mis_shaped,
    mis_ordered,
    wrong_dtype,
    wrong_op,
    wrong_source,
    wrong_counts,
    wrong_transfer,
]
"""Those in which ranks that call different things meet."""
FAULTS = [
    *MET,
    skipped_at_the_end,
    skipped_before_its_like,
    doubled_at_the_end,
]


def faulty(mesh, fault, bad):
    """Make the calls of a fault, of which one rank makes others."""
    axis, rest = mesh.twin("tp"), {"axis": mesh.world, "bad": bad}
    with mesh.device:
        all_gather(torch.ones(2), axis)  # what is right is let through
        fault(axis, rest, mesh.rank == bad)


def recorded(mesh, fault, bad):
    """What this rank communicates where one rank has a fault."""
    with record(mesh) as recorder:
        faulty(mesh, fault, bad)
    return recorder.entries


def compared(mesh, fault, bad):
    """The same with calls that are compared before they start, and with no check of torch's."""
    with compare_collectives(mesh):
        faulty(mesh, fault, bad)


def calls_and_computes(mesh, seconds):
    """The last rank is late, and right: nothing but the watchdog's limit is against it."""
    all_reduce(torch.ones(4), mesh["tp"])  # too_late: one
    if mesh.rank == mesh.config.world_size - 1:
        time.sleep(seconds)
    all_gather(torch.ones(4), mesh["tp"])  # too_late: others
