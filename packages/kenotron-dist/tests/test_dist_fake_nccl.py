"""The fake NCCL has the traps of NCCL, and this package avoids them."""

import gc
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from kenotron_dist import Mesh, MeshConfig, RankError, all_gather, all_reduce, barrier, shift
from kenotron_dist.device import bind_thread, choose_device, register_backend
from kenotron_dist.diagnosis import failure_broadcast, watch
from kenotron_dist.fake_world import FAKE_NCCL
from kenotron_dist.in_flight import CallsInFlight
from kenotron_dist.launch import debugging
from kenotron_dist.proof import fake_work
from kenotron_dist.testing import on_nccl, on_ranks


def on_fake(fn, *args, seconds=20, **sizes):
    return on_ranks(fn, *args, seconds=seconds, backend=FAKE_NCCL, **sizes)


def early_reader(mesh):
    """What is read before ``wait``, and what an input becomes that is changed before it."""
    axis, x = mesh["tp"], torch.ones(4)
    fake_work._DELAY = 0.3  # a busy machine may be as slow to look
    handle = all_reduce(x, axis, async_op=True)
    early = handle._result.clone()
    late = handle.wait()
    given = torch.ones(4)
    out = torch.empty(8)
    work = dist.all_gather_into_tensor(out, given, group=axis.group, async_op=True)
    given.zero_()  # too early
    work.wait()
    return early.isnan().all().item(), late.tolist(), out.sum().item()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name of a gather: it is on purpose
def test_a_result_read_early_is_poison_and_an_input_changed_early_is_lost():
    for early, late, gathered in on_fake(early_reader, tp=2):
        assert early and late == [2.0] * 4 and gathered == 0


def inferred(mesh):
    """Sums of tensors that were made for inference, of one that was not, and a gather."""
    axis, plain = mesh["tp"], torch.ones(3)
    with torch.inference_mode():
        x = torch.ones(3)
        found = [all_reduce(x, axis), all_reduce(plain, axis), all_gather(x, axis)]
    found.append(all_reduce(plain, axis))
    assert found[-1].requires_grad_().is_leaf and not found[-1].is_inference()
    return [out.sum().item() for out in found]


def test_it_writes_tensors_of_inference_mode_too():
    assert on_fake(inferred, tp=2) == [[6.0] * 4] * 2


def aborted(mesh):
    """What becomes of a sum under way that one rank does not join, and of a later one."""
    axis = mesh["tp"]
    under_way = all_reduce(torch.ones(2), axis, async_op=True) if mesh.rank == 0 else None
    axis.group.abort()
    lost = None if under_way is None else under_way.wait().isnan().all().item()
    with pytest.raises(RuntimeError, match="fake_nccl: communicator all was aborted"):
        all_reduce(torch.ones(2), axis)
    with pytest.raises(RuntimeError, match="fake_nccl: communicator all was aborted"):
        shift(torch.ones(2), axis)
    assert axis.group._batch is None  # NCCL's is one of the thread, for all groups
    return lost


def test_after_an_abort_waits_end_and_calls_raise():
    assert on_fake(aborted, tp=2) == [True, None]


def compiled(mesh):
    """A function with graph breaks at its communications, whose group must have a name."""
    axis = mesh["tp"]

    @torch.compile(backend="eager")
    def run(x):
        return all_reduce(x * 2, axis) + 1

    names = {mesh[name].group.group_name for name in ("tp", "pp")}
    return [run(torch.full((2,), float(i))).tolist() for i in range(3)], len(names)


def test_the_compiler_looks_no_further_into_it_than_into_nccl():
    for found, names in on_fake(compiled, tp=2, pp=2):
        assert found == [[1.0 + 4 * i] * 2 for i in range(3)] and names == 2


def circle(mesh):
    """Each rank's first transfer is with the next one: communicators are made in a circle."""
    axis = mesh["tp"]
    to, source = (axis.rank + 1) % 3, (axis.rank - 1) % 3
    sent = axis.group.send([torch.ones(2)], to, 0)
    axis.group.recv([torch.ones(2)], source, 0).wait()
    sent.wait()


def test_first_transfers_in_a_circle_hang():
    with pytest.raises(RankError, match="fake_nccl: communicator .* 1 of 2 ranks came within"):
        on_fake(circle, seconds=2, tp=3)


def watched_gather(mesh):
    """What the watchdog sees of a landed gather, and whether its output is freed meanwhile."""
    axis = mesh["tp"]
    fake_work._LAG = 4.0  # longer than the looks at it take on a busy machine
    with watch(mesh, limit=timedelta(seconds=20)):
        x = all_gather(torch.ones(4), axis)
        seen = [(wait.ticket.operation, wait.on_device) for wait in mesh.pulse.waits()]
        kept = weakref.ref(x.untyped_storage())
        gone = weakref.ref(x)
        del x
        gc.collect()
        freed = gone() is None
        held = [id(job) for _, job in mesh.pulse._queued]
        time.sleep(4.1)
        left = mesh.pulse.waits()
    return seen, freed, bool(held), left, kept() is None


def test_a_landed_work_keeps_no_output_alive():
    for seen, freed, held, left, kept in on_fake(watched_gather, tp=2):
        assert seen == [("all_gather", True)]  # the device may still be at it
        assert freed and held and kept
        assert left == []


def ranks_at_a_barrier(mesh):
    """Seconds that rank 0 was in the barrier which rank 1 entered 0.3 s later; marks at its end."""
    marks, axis = [], mesh["tp"]
    make = type(axis).mark
    type(axis).mark = lambda self: marks.append(make(self)) or marks[-1]
    began = time.monotonic()
    if axis.rank == 1:
        time.sleep(0.3)
    barrier(axis)
    return time.monotonic() - began, [mark.is_completed() for mark in marks]


def test_a_barrier_blocks_the_process_until_its_device_is_there():
    for seconds, marks in on_fake(ranks_at_a_barrier, tp=2):
        assert seconds >= 0.3 and marks and all(marks)


def made_pairs(mesh):
    pairs = mesh.pairs("pp")
    assert mesh.pairs("pp") is pairs
    found = {}
    for (source, to), axis in sorted(pairs.items()):
        assert axis.ranks == (mesh["pp"].ranks[source], mesh["pp"].ranks[to])
        assert axis.name == "pp" and axis.ranks[axis.rank] == mesh.rank
        found[source, to] = id(axis.group)
    assert len(set(found.values())) == len(found)
    later = mesh.twin("pp")  # names of groups still agree
    total = all_reduce(torch.ones(1), later)
    return sorted(found), total.item()


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("run", [on_ranks, on_fake], ids=["gloo", "fake_nccl"])
def test_every_pair_of_neighbours_has_a_group_for_each_direction(run, pp):
    for rank, (found, total) in enumerate(run(made_pairs, pp=pp)):
        ring = {(rank, (rank + 1) % pp), ((rank - 1) % pp, rank)} if pp > 1 else set()
        assert found == sorted(ring | {(b, a) for a, b in ring})
        assert total == pp


def bound(mesh):
    dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
    with pytest.raises(ValueError, match=r"bound to cpu:0: .*init_process_group without device_id"):
        Mesh.connect(tp=2)


def test_a_group_bound_to_a_device_is_refused():
    on_ranks(bound, tp=2)


def threads_of(mesh, device):
    """Names of the threads that made ``device`` their own, with a watchdog and a distress line."""
    found = []

    def note(index):
        found.append((threading.current_thread().name, index))

    there = Mesh(mesh.config, mesh.rank, device)
    there.pulse = CallsInFlight()
    before = torch.accelerator.set_device_index
    torch.accelerator.set_device_index = note
    try:
        with watch(there, limit=timedelta(seconds=10)):
            failure_broadcast.FailureBroadcast([mesh["tp"]])
            time.sleep(0.3)
        bind_thread(device)
    finally:
        torch.accelerator.set_device_index = before
    return sorted(set(found))


def test_every_thread_of_a_watchdog_sets_the_device_first():
    for found in on_ranks(threads_of, torch.device("cuda", 3), tp=2):
        assert found == [("MainThread", 3), ("kenotron-heartbeat", 3), ("kenotron-watchdog", 3)]


def test_a_device_without_a_number_gets_that_of_the_process(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)
    assert Mesh(MeshConfig(), 0, torch.device("cuda")).device == torch.device("cuda", 5)
    assert Mesh(MeshConfig(), 0, torch.device("cpu")).device == torch.device("cpu")


def test_the_fake_is_for_the_cpu_and_a_word_of_the_debugging_variable():
    assert choose_device(None, FAKE_NCCL, 8, 2) == ("cpu", FAKE_NCCL)
    assert debugging({"KENOTRON_DEBUG": "fake_nccl"}) == {"fake_nccl"}
    with pytest.raises(ValueError, match="'nccl' is not known: set it to collectives or fake_nccl"):
        debugging({"KENOTRON_DEBUG": "nccl"})


def test_where_the_wheel_is_installed_the_fake_is_missing_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "kenotron_dist.proof.fake_nccl", None)
    with pytest.raises(ValueError, match="'fake_nccl' is not in the wheel of kenotron-dist"):
        register_backend(FAKE_NCCL)
    register_backend("gloo")


def pieces_of(mesh):
    """Ranges of parameters gathered in place, whose elements the ranks divide or not."""
    from kenotron_dist import gather_pieces

    axis = mesh["dp"]
    n, me = axis.size, axis.rank
    whole = [torch.arange(float(size)) for size in (8 * n, 3, 4 * n, 2 * n + 1)]
    found = [torch.full_like(x, -1.0) for x in whole]
    pieces = []
    for rank in range(n):
        pieces.append([])
        for out in found:
            size = -(-len(out) // n)
            pieces[-1].append(out[min(rank * size, len(out)) : min((rank + 1) * size, len(out))])
    for out, x in zip(found, whole, strict=True):
        size = -(-len(x) // n)
        out[me * size : (me + 1) * size] = x[me * size : (me + 1) * size]
    gather_pieces(pieces, axis).wait()
    assert all(torch.equal(out, x) for out, x in zip(found, whole, strict=True))
    return [ticket.operation for ticket in mesh.pulse.tickets.values() if ticket.axis == "dp"]


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_equal_ranges_are_gathered_in_place(dp):
    for operations in on_nccl(pieces_of, dp=dp):
        assert operations == ["gather_pieces (packed)"]  # the last one: the rest
    on_ranks(pieces_of, dp=dp)


def test_without_uneven_ranges_nothing_is_packed():
    for operations in on_nccl(even_pieces, dp=2):
        assert operations == ["gather_pieces (in place)"]


def even_pieces(mesh):
    from kenotron_dist import gather_pieces

    axis = mesh["dp"]
    x = torch.full((6,), float(axis.rank))
    gather_pieces([[x[:3]], [x[3:]]], axis).wait()
    assert x.tolist() == [0.0] * 3 + [1.0] * 3
    return [ticket.operation for ticket in mesh.pulse.tickets.values() if ticket.axis == "dp"]
