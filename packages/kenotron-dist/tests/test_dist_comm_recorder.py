"""A recorder hears of every communication; without one nothing is made for it."""

import ast
import threading
from pathlib import Path

import dist_verbs
import pytest
import torch

import kenotron_dist
from kenotron_dist import all_gather, all_reduce, handle, point_to_point, reduce_scatter
from kenotron_dist.diagnosis import record, shape_axes
from kenotron_dist.testing import on_nccl, on_ranks

SOURCES = Path(kenotron_dist.__file__).parent


def issued(mesh):
    """Communications of data so far."""
    return sum(t.number for t in mesh.pulse.tickets.values() if t.axis != "group")


def each_verb(mesh, without=()):
    """What is recorded of every verb, and from which files; and the counts of tickets."""
    axis, found, files = dist_verbs.axis_of(mesh), {}, set()
    with record(mesh) as recorder:
        for name, verb in dist_verbs.VERBS.items():
            if name in without:
                continue
            verb(axis)
            entries = recorder.cut()
            found[name] = [
                (f"{e.ticket.operation}{f' ({e.how})' if e.how else ''}", e.dtype, e.shape, e.sent)
                for e in entries
            ]
            files |= {Path(e.ticket.file).name for e in entries}
    return found, files, issued(mesh)


@pytest.mark.gloo(reason="NCCL's collectives send other bytes, and all send first in one of these")
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_verb_is_recorded_with_the_bytes_that_leave_the_rank(ranks):
    for rank, (found, files, issued) in enumerate(on_ranks(each_verb, tp=ranks)):
        assert found == dist_verbs.expected(ranks, rank)
        assert files == {"dist_verbs.py"}  # who called, not this package
        assert issued == sum(map(len, found.values()))


def all_verbs_are_there(mesh):
    found = each_verb(mesh, ["transfers"])[0]  # all send first: on NCCL they would never meet
    return {name: len(entries) for name, entries in found.items()}


def test_every_verb_is_recorded_over_nccl():
    for counts in on_nccl(all_verbs_are_there, tp=2):
        assert counts.keys() == dist_verbs.VERBS.keys() - {"transfers"} and all(counts.values())


class Counting(tuple):
    """Listeners, of which there are none; counts how often that is asked."""

    times = 0

    def __bool__(self):
        Counting.times += 1
        return False


def without_recorder(mesh):
    def made(*args, **options):
        raise AssertionError("an entry was made for nobody")

    for module in (handle, point_to_point):
        for name in ("of_verb", "of_exchange", "of_transfer"):
            if hasattr(module, name):
                setattr(module, name, made)
    axis = dist_verbs.axis_of(mesh)
    mesh.pulse.listeners = Counting()
    for verb in dist_verbs.VERBS.values():
        verb(axis)
    return Counting.times, issued(mesh)


@pytest.mark.gloo(reason="in a ring in which all send first NCCL's ranks never meet")
def test_without_a_recorder_one_test_is_all():
    for times, issued in on_ranks(without_recorder, tp=2):
        assert times == issued > 20


def axes_and_cuts(mesh):
    x = torch.ones(2, 3)
    with record(mesh) as outer:
        all_reduce(x, mesh["tp"])
        with record(mesh) as inner:
            all_reduce(x, mesh["dp"])
            all_reduce(x, mesh.twin("tp"))
            thread = threading.Thread(target=all_reduce, args=(x, mesh.world))
            thread.start()
            thread.join()
            all_reduce(x, mesh["dp", "cp"])
            all_reduce(x, mesh.subaxis("tp", 1))
        all_reduce(x, mesh["cp"])  # one rank: nothing is communicated
        first = outer.cut()
        all_reduce(x, mesh["tp"])
    all_reduce(x, mesh["tp"])
    return (
        outer.bytes_per_axis(first),
        outer.bytes_per_axis(),
        inner.bytes_per_axis(),
        inner.entries,
    )


@pytest.mark.gloo(reason="a sum of four ranks sends other bytes over NCCL")
def test_bytes_are_told_apart_by_axis_and_cut_into_steps():
    for first, rest, inner, entries in on_ranks(axes_and_cuts, dp=2, tp=2):
        # A twin, the whole of an axis and one with axes of one rank count as the axis.
        assert first == {"tp": 3 * 24, "dp": 2 * 24, "world": 3 * 24}
        assert rest == {"tp": 24}
        assert inner == {"tp": 2 * 24, "dp": 2 * 24, "world": 3 * 24}
        assert [entry.ticket.operation for entry in entries if not entry.dtype] == ["new_group"]
        assert [entry.ticket.number for entry in entries if entry.dtype] == [1] * 5
        assert entries[0].ticket.channel in ("dp:0,2", "dp:1,3")


BACKEND = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
BACKEND |= {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast"}
BACKEND |= {"reduce", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "barrier"}
BACKEND |= {"reduce_scatter_single", "all_to_all", "all_to_all_single", "monitored_barrier"}


def verbs_of(nodes):
    """Verbs of torch among some nodes, as attributes of ``dist`` or of a group."""
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in BACKEND
        and (ast.unparse(node.value) == "dist" or ast.unparse(node.value).endswith("group"))
    }


def named_and_called(source):
    """Verbs that a file names, and those of them that it calls where it names them."""
    nodes = list(ast.walk(ast.parse(source)))
    return verbs_of(nodes), verbs_of(node.func for node in nodes if isinstance(node, ast.Call))


def test_no_file_calls_the_backend_past_the_recorder():
    files = {path.name: named_and_called(path.read_text()) for path in SOURCES.rglob("*.py")}
    assert {name: called for name, (named, called) in files.items() if named} == {
        "collectives.py": set(),  # all are arguments of ``start``
        "failure_broadcast.py": {"irecv"},  # closes connections: nothing arrives
        "process_groups.py": {"all_reduce"},  # the first one is a part of making a group
        "handle.py": set(),
        "torch_names.py": set(),
        "point_to_point.py": set(),
        "message_size.py": set(),
    }
    assert named_and_called("f(dist.all_reduce, axis.group.send(x))") == (
        {"all_reduce", "send"},
        {"send"},
    )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_axes_without_processes_record_what_shapes_would_send(backend):
    axes, recorder = shape_axes({"tp": 4, "ep": 2, "one": 1}, backend)
    x = torch.empty(8, 4096, device="meta")
    with recorder:
        all_reduce(x, axes["tp"])
        reduce_scatter(x, axes["tp"])
        all_gather(x, axes["ep"], async_op=True).wait()
        all_reduce(x, axes["one"])
    sizes = {"tp": x.nbytes * 3 // 2 + x.nbytes * 3 // 4, "ep": x.nbytes}
    assert recorder.bytes_per_axis() == sizes
    assert [entry.ticket.operation for entry in recorder.entries][:1] == ["all_reduce"]
    all_reduce(x, axes["tp"])  # it is closed
    assert recorder.bytes_per_axis() == sizes
