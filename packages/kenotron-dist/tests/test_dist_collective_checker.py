"""KENOTRON_DEBUG=collectives: what is right passes, whatever its order; who asks for it gets it."""

import multiprocessing
import time
from datetime import timedelta

import dist_faults
import dist_verbs
import pytest
import torch
import torch.distributed as dist

from kenotron_dist import (
    Mesh,
    RankError,
    all_reduce,
    barrier,
    compare_collectives,
    receive,
    record,
    send,
    watch,
)
from kenotron_dist.diagnosis.collective_checker import CollectiveChecker
from kenotron_dist.diagnosis.divergence import Call, divergence
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


def too_late(mesh):
    reports = []
    limit = timedelta(seconds=1)
    with watch(mesh, limit=limit, on_stall=reports.append), compare_collectives(mesh):
        dist_faults.calls_and_computes(mesh, 12.0)
    return [str(report) for report in reports]


def test_the_watchdog_names_both_lines_of_a_rank_that_computes_too_long():
    [report], nothing = on_ranks(too_late, tp=2)
    assert not nothing
    waits, last = (dist_faults.line(f"too_late: {who}") for who in ("others", "one"))
    assert f"called at dist_faults.py:{waits}: rank 1 has not joined" in report
    assert "it has called nothing for" in report and f"called at dist_faults.py:{last}" in report


def one_raises(mesh):
    began = time.monotonic()
    try:
        with compare_collectives(mesh):
            if mesh.rank == 1:
                raise ValueError("no good")
            all_reduce(torch.ones(2), mesh["tp"])
    except (ValueError, RuntimeError) as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_rank_that_fails_is_told_to_those_who_wait():
    (waits, seconds), (fails, _) = on_ranks(one_raises, tp=2)
    assert fails == "no good" and seconds < 10
    assert "all_reduce #1 over tp (ranks 0, 1), called at test_dist_collective_checker.py" in waits
    assert waits.endswith("failed: rank 1 has ended (ValueError: no good)")


def many(mesh, port):
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
    return [type(each).__name__ for each in mesh.pulse.listeners]


def test_the_environment_of_the_program_decides(monkeypatch):
    monkeypatch.delenv("KENOTRON_DEBUG", raising=False)
    assert on_ranks(listeners, tp=2) == [[], []]
    monkeypatch.setenv("KENOTRON_DEBUG", "collectives")
    assert on_ranks(listeners, tp=2) == [["CollectiveChecker"], ["CollectiveChecker"]]
    with pytest.raises(RankError, match="rank 0: Diverged: ranks diverge: rank 0 waits in") as told:
        on_ranks(dist_faults.finishes_early, tp=2)
    assert "which rank 1 will not call: finished; the last before it: rank 1" in str(told.value)
    assert f"dist_faults.py:{dist_faults.line('finishes_early: others')}" in str(told.value)
    monkeypatch.setenv("KENOTRON_DEBUG", "collectives,losses")
    with pytest.raises(ValueError, match=r"KENOTRON_DEBUG=.*: 'losses' is not known: set it to"):
        on_ranks(listeners, tp=2)
    with pytest.raises(ValueError, match="'losses' is not known"):
        Mesh.connect()
    assert debugging({"KENOTRON_DEBUG": " collectives, "}) == {"collectives"}
    assert debugging({}) == frozenset()


def test_under_a_launcher_a_rank_that_has_finished_is_told(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "kenotron_dist"])
    port = str(free_port())
    arguments = [(rank, port, str(tmp_path)) for rank in range(2)]
    ranks = [context.Process(target=dist_faults.launched, args=each) for each in arguments]
    for rank in ranks:
        rank.start()
    ranks[0].join(90)
    for rank in ranks:
        rank.kill()
        rank.join()
    assert (tmp_path / "0.txt").exists(), "rank 0 has not ended in time"
    text = (tmp_path / "0.txt").read_text()
    assert text.startswith("ranks diverge: rank 0 waits in all_reduce (sum) of float32 (4,)")
    assert "which rank 1 will not call: finished" in text


def test_one_rank_needs_no_store():
    assert on_ranks(compared, ["all_reduce"]) == [True]


def call(operation="all_reduce", shape=(4,), site="a.py:1", dtype="float32", **counts):
    return Call(operation, "", dtype, shape, site, **counts)


def test_the_odd_one_is_blamed_where_most_agree():
    calls = {rank: call() for rank in range(12)} | {7: call(shape=(5,), site="b.py:2")}
    text = divergence("tp:0..11", 3, range(12), calls)
    assert text == (
        "ranks diverge at communication 3 on tp:0..11: rank 7 alone called all_reduce of float32 "
        "(5,) at b.py:2; ranks 0, 1, 2, 3, 4, 5, 6, 8, ... 11: 11 in all called all_reduce of "
        "float32 (4,) at a.py:1"
    )
    assert "alone" not in divergence("tp", 3, range(2), {0: call(), 1: call(shape=(5,))})
    halves = {rank: call(shape=(rank % 2,)) for rank in range(4)}
    assert "alone" not in divergence("tp", 3, range(4), halves)


def test_lines_alone_are_no_divergence_nor_are_shapes_of_a_transfer():
    assert not divergence("tp", 1, range(2), {0: call(), 1: call(site="b.py:9")})
    sent = call("send", (2, 3), gives=(0, 24), takes=(0, 0))
    taken = call("receive", (6,), gives=(0, 0), takes=(24, 0))
    assert not divergence("pp:0>1#0", 1, (0, 1), {0: sent, 1: taken})
    assert Call.decode(sent.encode()) == sent
    wrong = {0: sent, 1: taken._replace(dtype="bfloat16")}
    assert "rank 1 called receive of bfloat16" in divergence("pp:0>1#0", 1, (0, 1), wrong)
