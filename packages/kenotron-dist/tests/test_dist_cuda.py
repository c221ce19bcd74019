"""The verbs over NCCL on GPUs, but for the order and precision of sums: NCCL promises neither."""

import pytest
import test_dist_autograd
import test_dist_collectives as collectives
import torch
from dist_ranks import needs_gpu, on_gpus
from torch.testing import assert_close

from kenotron_dist import (
    all_reduce,
    broadcast_object,
    check_replicas,
    gather_objects,
    receive,
    send,
)

pytestmark = needs_gpu


def verbs(mesh):
    assert mesh.backend == "nccl" and mesh.device.type == "cuda"
    collectives.check_sums(mesh, [torch.float32, torch.float64, torch.int64])
    collectives.check_abandoned(mesh)
    collectives.check_no_graph(mesh)
    collectives.check_moves(mesh)
    collectives.check_all_to_all(mesh)
    collectives.check_broadcast_and_barrier(mesh)
    collectives.check_several_in_flight(mesh)
    collectives.shifts(mesh)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_verb(tp):
    on_gpus(verbs, tp=tp)


def half_sums(mesh):
    axis = mesh["tp"]
    rows = torch.stack([collectives.exact(rank, (1000,)) for rank in range(axis.size)])
    for dtype in (torch.bfloat16, torch.float16):
        found = all_reduce(rows[axis.rank].to(dtype), axis)
        assert_close(found, rows.to(dtype).double().sum(0).to(dtype))


def test_sums_in_half_precision_are_near():
    on_gpus(half_sums, tp=4)


@pytest.mark.parametrize("tp", [2, 3])
def test_backward_is_the_transpose(tp):
    shares = on_gpus(test_dist_autograd.transposes, tp=tp)
    for name in shares[0]:
        forward, backward = (sum(share[name][i] for share in shares) for i in (0, 1))
        assert forward == pytest.approx(backward, rel=1e-12)


def messages(mesh):
    """Transfers in order, a twin in the other direction, objects, agreement."""
    down, up = mesh["pp"], mesh.twin("pp")
    other, n = 1 - down.rank, 1 << 20
    mine = torch.full((n,), float(down.rank))
    first, second = (down, up) if down.rank == 0 else (up, down)
    sent = send(mine, first, other)
    got = [receive(torch.empty(n), second, other).wait()]
    sent.wait()
    assert (got[0] == other).all()
    assert gather_objects({"rank": down.rank}, down) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_object("hello" if down.rank == 0 else None, down) == "hello"
    check_replicas({"same": torch.ones(5)}, down)


def test_messages():
    on_gpus(messages, pp=2)
