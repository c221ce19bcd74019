"""Every public verb once, with what a recorder must keep of it."""

import torch
import torch.distributed as dist

from kenotron_dist import (
    all_gather,
    all_reduce,
    all_to_all,
    autograd,
    barrier,
    broadcast,
    broadcast_object,
    gather_objects,
    gather_pieces,
    gather_rows,
    receive,
    reduce_scatter,
    send,
    shift,
    sum_rows,
)


def axis_of(mesh):
    """A line of all ranks that torch does not check: its count of calls differs after transfers."""
    dist.set_debug_level(dist.DebugLevel.OFF)
    return mesh.twin("tp")


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


def transfers(axis):
    """A ring of transfers in which everybody sends first."""
    n, me = axis.size, axis.rank
    sent = send(ones(6), axis, (me + 1) % n, tag=5)
    out = torch.empty(2, 3)  # as many elements: the shape is each side's own
    receive(out, axis, (me - 1) % n, tag=5).wait()
    sent.wait()


def uneven(axis):
    """Rank i gives rank j i + j rows of five: nothing, where both are 0."""
    n, me = axis.size, axis.rank
    counts = [me + j for j in range(n)]
    all_to_all(ones(sum(counts), 5, dtype=torch.bfloat16), axis, counts, counts)


def pieces(axis):
    """Rank 0 has a large one and a small one, the others none."""
    own = [[ones(1 << 15), ones(7)], *[[]] * (axis.size - 1)]
    gather_pieces(own, axis).wait()


def with_gradients(verb, *args):
    def run(axis):
        x = ones(4, 4).requires_grad_()
        verb(x, axis, *args).sum().backward()

    return run


ROUNDS = 20_001  # elements of a sum that takes two rounds from three ranks on

VERBS = {
    "all_reduce": lambda axis: all_reduce(ones(3, 5), axis),
    "all_reduce max": lambda axis: all_reduce(ones(8, dtype=torch.int64), axis, "max"),
    "all_reduce large": lambda axis: all_reduce(ones(ROUNDS), axis),
    "all_gather": lambda axis: all_gather(ones(3, 5), axis, 1),
    "reduce_scatter": lambda axis: reduce_scatter(ones(3, 8), axis, 1),
    "all_to_all": lambda axis: all_to_all(ones(8, 5), axis),
    "all_to_all uneven": uneven,
    "broadcast": lambda axis: broadcast(ones(3, 5), axis, 1),
    "barrier": lambda axis: barrier(axis),
    "broadcast_object": lambda axis: broadcast_object({"a": 1}, axis),
    "gather_objects": lambda axis: gather_objects("x" * axis.rank, axis),
    "sum_rows": lambda axis: sum_rows(ones(axis.size, 6), axis).wait(),
    "gather_rows": lambda axis: gather_rows(ones(axis.size, 6), axis).wait(),
    "gather_pieces": pieces,
    "shift": lambda axis: shift(ones(6), axis),
    "transfers": transfers,
    "copy_to": with_gradients(autograd.copy_to),
    "reduce_from": with_gradients(autograd.reduce_from),
    "gather_from": with_gradients(autograd.gather_from),
    "scatter_to": with_gradients(autograd.scatter_to),
    "all_gather_from": with_gradients(autograd.all_gather_from),
    "reduce_scatter_to": with_gradients(autograd.reduce_scatter_to),
    "autograd.all_to_all": with_gradients(autograd.all_to_all, None, None),
}


def expected(n, me):
    """What rank ``me`` of ``n`` keeps: operation, dtype, shape, bytes that leave it. By hand."""
    f4 = "float32"
    large = -(-ROUNDS // n) * 4
    if n == 2:
        rounds = [("all_reduce (sum)", f4, (ROUNDS,), 4 * ROUNDS)]
    else:
        rounds = [
            ("all_reduce (sum)", f4, (ROUNDS,), (n - 1) * large),
            ("all_reduce (second round)", f4, (-(-ROUNDS // n),), (n - 1) * large),
        ]
    mine = sum(me + j for j in range(n))
    first = me == 0
    square = ("all_reduce (sum)", f4, (4, 4), (n - 1) * 64)
    columns = ("all_gather", f4, (4, 4 // n), (n - 1) * 64 // n)
    scattered = ("reduce_scatter", f4, (4, 4), (n - 1) * 64 // n)
    dealt = ("all_to_all", f4, (4, 4), (n - 1) * 64 // n)
    longest = len('""') + n - 1
    return {
        "all_reduce": [("all_reduce (sum)", f4, (3, 5), (n - 1) * 60)],
        "all_reduce max": [("all_reduce (max)", "int64", (8,), 2 * (n - 1) * 64 // n)],
        "all_reduce large": rounds,
        "all_gather": [("all_gather", f4, (3, 5), (n - 1) * 60)],
        "reduce_scatter": [("reduce_scatter", f4, (3, 8), (n - 1) * 96 // n)],
        "all_to_all": [("all_to_all", f4, (8, 5), (n - 1) * 160 // n)],
        "all_to_all uneven": [("all_to_all", "bfloat16", (mine, 5), (mine - 2 * me) * 10)],
        "broadcast": [("broadcast (from 1)", f4, (3, 5), (n - 1) * 60 * (me == 1))],
        "barrier": [("all_reduce (sum)", f4, (1,), (n - 1) * 4)],
        "broadcast_object": [
            ("broadcast (from 0)", "int64", (2,), (n - 1) * 16 * first),
            ("broadcast (from 0)", "uint8", (8,), (n - 1) * 8 * first),
        ],
        "gather_objects": [
            ("all_gather", "int64", (2,), (n - 1) * 16),
            ("gather_objects", "uint8", (longest,), (n - 1) * longest),
        ],
        "sum_rows": [("sum_rows", f4, (n, 6), (n - 1) * 24)],
        "gather_rows": [("gather_rows", f4, (6,), (n - 1) * 24)],
        "gather_pieces": [
            ("gather_pieces", f4 * first, ((1 << 15) * first,), (n - 1) * (1 << 17) * first),
            ("gather_pieces (packed)", f4, (7,), (n - 1) * 28),
        ],
        "shift": [("shift (by 1)", f4, (6,), 24)],
        "transfers": [("send", f4, (6,), 24), ("receive", f4, (2, 3), 0)],
        "copy_to": [square],
        "reduce_from": [square],
        "gather_from": [("all_gather", f4, (4, 4), (n - 1) * 64)],
        "scatter_to": [columns],
        "all_gather_from": [
            ("all_gather", f4, (4, 4), (n - 1) * 64),
            ("reduce_scatter", f4, (4 * n, 4), (n - 1) * 64),
        ],
        "reduce_scatter_to": [scattered, ("all_gather", f4, (4 // n, 4), (n - 1) * 64 // n)],
        "autograd.all_to_all": [dealt, dealt],
    }
