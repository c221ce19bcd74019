"""KENOTRON_DEBUG=collectives: what is right passes, whatever its order; who asks for it gets it."""

import time

import dist_verbs
import pytest
import torch
import torch.distributed as dist

from kenotron_dist import Mesh, all_reduce, barrier, receive, send
from kenotron_dist.diagnosis import collective_checker, compare_collectives, record
from kenotron_dist.diagnosis.collective_checker import CollectiveChecker
from kenotron_dist.launch import debugging
from kenotron_dist.testing import free_port, on_nccl, on_ranks


def compared(mesh, names):
    with compare_collectives(mesh):
        for name in names:
            dist_verbs.VERBS[name](dist_verbs.axis_of(mesh))
    return True


@pytest.mark.gloo(reason="in a ring in which all send first NCCL's ranks never meet")
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_verb_passes(ranks):
    assert on_ranks(compared, [*dist_verbs.VERBS], tp=ranks) == [True] * ranks


def test_every_verb_passes_over_nccl():
    names = [name for name in dist_verbs.VERBS if name != "transfers"]  # all send first
    assert on_nccl(compared, names, tp=2) == [True, True]


def out_of_step(mesh):
    """Rank 0 issues a sum and then serves a transfer; rank 1 needs the transfer for the sum."""
    axis = dist_verbs.axis_of(mesh)
    with compare_collectives(mesh):
        if mesh.rank == 0:
            total = all_reduce(torch.ones(2), axis, async_op=True)
            send(torch.full((2,), 3.0), axis, 1).wait()
            return total.wait().tolist()
        time.sleep(1.5)  # it computes: nobody may think that it has diverged
        x = torch.empty(2)
        receive(x, axis, 0).wait()
        return all_reduce(x, axis).tolist()


def test_no_lawful_order_is_held_up_and_long_computing_is_borne():
    assert on_ranks(out_of_step, tp=2) == [[4.0, 4.0], [4.0, 4.0]]


def many(mesh, port):
    collective_checker._KEPT = 5
    store = dist.TCPStore("127.0.0.1", port, is_master=mesh.rank == 0, wait_for_workers=False)
    with CollectiveChecker(mesh.pulse, mesh.rank, store):
        for _ in range(60):
            all_reduce(torch.ones(2), mesh["tp"])
        keys = store.num_keys()
    barrier(mesh.world)  # rank 0 hosts the store
    return keys


def test_what_is_over_is_erased_from_the_store():
    assert max(on_ranks(many, free_port(), tp=2)) < 20


def listeners(mesh):
    with record(mesh):
        all_reduce(torch.ones(2), mesh["tp"])
    return [type(each.__self__).__name__ for each in mesh.pulse.listeners]


def test_the_environment_of_the_program_decides(monkeypatch):
    monkeypatch.delenv("KENOTRON_DEBUG", raising=False)
    assert on_ranks(listeners, tp=2) == [[], []]
    monkeypatch.setenv("KENOTRON_DEBUG", "collectives")
    assert on_ranks(listeners, tp=2) == [["CollectiveChecker"], ["CollectiveChecker"]]
    monkeypatch.setenv("KENOTRON_DEBUG", "collectives,losses")
    with pytest.raises(ValueError, match=r"KENOTRON_DEBUG=.*: 'losses' is not known: set it to"):
        on_ranks(listeners, tp=2)
    with pytest.raises(ValueError, match="'losses' is not known"):
        Mesh.connect()
    assert debugging({"KENOTRON_DEBUG": " collectives, "}) == {"collectives"}
    assert debugging({}) == frozenset()


def test_one_rank_needs_no_store():
    assert on_ranks(compared, ["all_reduce"]) == [True]
