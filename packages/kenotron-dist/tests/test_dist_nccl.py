"""The verbs over NCCL, but for the order and precision of sums, of which it promises nothing.

Without a GPU they run over the fake NCCL, on the CPU.
"""

import pytest
import test_dist_autograd
import test_dist_collectives as collectives
import torch
from torch.testing import assert_close

from kenotron_dist import all_reduce, broadcast_object, gather_objects, receive, send
from kenotron_dist.diagnosis import check_replicas
from kenotron_dist.placement import TensorLayout
from kenotron_dist.testing import on_nccl


def verbs(mesh):
    assert mesh.backend != "gloo" and mesh["tp"].on_device
    summed = [torch.float32, torch.float64, torch.int64]  # NCCL rounds every partial sum
    collectives.check_sums(mesh, summed)
    collectives.check_abandoned(mesh)
    collectives.check_no_graph(mesh)
    collectives.check_moves(mesh, summed)
    collectives.check_all_to_all(mesh)
    collectives.check_broadcast_and_barrier(mesh)
    collectives.check_several_in_flight(mesh)
    collectives.shifts(mesh)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_verb(tp):
    on_nccl(verbs, tp=tp)


def half_sums(mesh):
    axis = mesh["tp"]
    rows = torch.stack([collectives.exact(rank, (1000,)) for rank in range(axis.size)])
    for dtype in (torch.bfloat16, torch.float16):
        found = all_reduce(rows[axis.rank].to(dtype), axis)
        rounding = (axis.size - 1) * torch.finfo(dtype).eps * rows.abs().sum(0).max()
        assert_close(found.double(), rows.to(dtype).double().sum(0), rtol=0, atol=rounding.item())


def test_sums_in_half_precision_are_near():
    on_nccl(half_sums, tp=4)


@pytest.mark.parametrize("tp", [2, 3])
def test_backward_is_the_transpose(tp):
    shares = on_nccl(test_dist_autograd.transposes, tp=tp)
    for name in shares[0]:
        forward, backward = (sum(share[name][i] for share in shares) for i in (0, 1))
        assert forward == pytest.approx(backward, rel=1e-12)


def messages(mesh):
    """Transfers in both directions, each over a group of its own; objects, agreement."""
    down, n = mesh["pp"], 1 << 20
    out, handles = torch.empty(n), []
    for (source, _), pair in sorted(mesh.pairs("pp").items()):  # first transfers in one order
        sends = source == down.rank
        x = torch.full((n,), float(down.rank)) if sends else out
        handles.append(send(x, pair, 1) if sends else receive(x, pair, 0))
    for handle in handles:
        handle.wait()
    assert (out == 1 - down.rank).all()
    assert gather_objects({"rank": down.rank}, down) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_object("hello" if down.rank == 0 else None, down) == "hello"
    check_replicas({"same": torch.ones(5)}, {"same": TensorLayout("same", (5,))}, mesh)


def test_messages():
    on_nccl(messages, pp=2)
