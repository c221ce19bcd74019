"""Ranks that do not meet: who is missing is named within the limit, by every rank that waits."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from test_dist_launch import TORCHRUN, variables

from kenotron_dist import STALLED, Mesh, World, spawn
from kenotron_dist.launch_store import check_backend
from kenotron_dist.rendezvous import Meeting
from kenotron_dist.testing import free_port

PROGRAM = """
import os, signal, sys
from datetime import timedelta
import kenotron_dist.launch as launch
from kenotron_dist import Mesh, MeshConfig, barrier, shutdown, start

sys.modules["kenotron_dist.start"]._LEAST_MEETING = timedelta(seconds=15)

def trained(mesh):
    barrier(mesh.world)
    print("met", flush=True)

def stopped(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == "__main__":
    where = os.environ.get("STOPS", "")
    if where == "init":
        launch.dist.init_process_group = stopped
    if where == "connect":
        Mesh.connect = stopped
    try:
        size = int(os.environ["WORLD_SIZE"])
        start(trained, config=MeshConfig(dp=size), limit=timedelta(seconds=15))
    finally:
        shutdown()
"""


def started(folder, port, rank, size, **more):
    program = folder / "program.py"
    if not program.exists():  # another rank may be reading it
        program.write_text(PROGRAM)
    environ = os.environ | variables(rank, size, port) | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.Popen(
        [sys.executable, program], env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@contextlib.contextmanager
def ended(ranks):
    """No rank outlives the test, whatever becomes of it."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("where", ["init", "connect"])
def test_a_rank_that_is_stopped_before_the_mesh_exists_is_named(where, tmp_path):
    port = free_port()
    ranks = [started(tmp_path, port, rank, 3) for rank in (0, 1)]
    ranks.append(started(tmp_path, port, 2, 3, STOPS=where))
    with ended(ranks):
        told = [rank.communicate(timeout=100)[1] for rank in ranks[:2]]
    assert [rank.returncode for rank in ranks[:2]] == [STALLED, STALLED], told
    who = (
        f"s for 3 ranks to meet: rank 2 \\(process {ranks[2].pid} on .*\\) has come, but is stopped"
    )
    if where == "connect":  # the others need not wait for it yet: it is the watchdog that finds it
        who = "s in all_reduce #1 over .*: rank 2 is stopped or dead"
    for rank, text in enumerate(told):
        assert re.search(f"rank {rank} (has )?waite?[ds] [0-9.]+ {who}", text), text


def test_a_rank_that_was_never_started_is_named(tmp_path):
    port = free_port()
    ranks = [started(tmp_path, port, rank, 3) for rank in (0, 2)]
    with ended(ranks):
        told = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [STALLED, STALLED], told
    assert all("3 ranks to meet: rank 1 has not come: see whether" in text for text in told)


def test_a_host_of_the_store_that_is_stopped_is_named(tmp_path):
    port = free_port()
    ranks = [started(tmp_path, port, 0, 2, STOPS="init"), started(tmp_path, port, 1, 2)]
    with ended(ranks):
        told = ranks[1].communicate(timeout=100)[1]
    assert ranks[1].returncode == STALLED, told
    assert re.search("rank 1 has waited .*: the store that they meet at does not answer", told), (
        told
    )


def test_torchrun_ends_with_who_was_missing(tmp_path):
    program = tmp_path / "program.py"
    stops = 'os.environ.get("STOPS", "")'
    program.write_text(PROGRAM.replace(stops, '"init" * (os.environ["RANK"] == "1")'))
    done = subprocess.run(
        [*TORCHRUN, program], capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode
    report = done.stderr[done.stderr.rindex("Root Cause") :]
    assert re.search(r"rank 0 has waited .*: rank 1 \(process .*has come, but is stopped", report)


LOCAL = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist
from kenotron_dist import MeshConfig, RankError, start

sys.modules["kenotron_dist.start"]._LEAST_MEETING = timedelta(seconds=10)

def trained(mesh):
    return "met"

right = dist.init_process_group

def init(*names, rank, **more):
    if rank == 1 and sys.argv[1:] != ["meet"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    return right(*names, rank=rank, **more)

dist.init_process_group = init

if __name__ == "__main__":
    try:
        print(start(trained, config=MeshConfig(dp=2), limit=timedelta(seconds=2)))
    except RankError as error:
        print(error, error.code)
"""


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.by_turns(1)
def test_local_ranks_are_named_too(meets, tmp_path):
    program = tmp_path / "local.py"
    program.write_text(LOCAL)
    done = subprocess.run(
        [sys.executable, program, *["meet"] * meets], capture_output=True, text=True, timeout=60
    )
    if meets:
        assert done.stdout == "met\n" and done.stderr == "", done.stderr
        return
    assert f"rank 0: exited: gave up (exit code {STALLED})" in done.stdout, done.stderr
    assert re.search(r"rank 0 has waited .* 2 ranks to meet: rank 1 \(process", done.stderr)


def test_ranks_that_all_answer_blame_the_network(tmp_path):
    told = []
    stores = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    limit = timedelta(seconds=0.4)
    meetings = [
        Meeting("a", store, rank, 2, limit, told.append) for rank, store in enumerate(stores)
    ]
    with meetings[0], meetings[1]:
        end = time.monotonic() + 20
        while len(told) < 2 and time.monotonic() < end:
            time.sleep(0.05)
    assert len(told) == 2 and all("all have come and answer, but they do not" in t for t in told)


def test_a_file_that_stays_locked_blames_no_rank(tmp_path):
    told = []
    store = dist.FileStore(str(tmp_path / "store"), 2)
    meeting = Meeting("a", store, 0, 2, timedelta(seconds=0.4), told.append)
    with open(tmp_path / "store") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as one that is stopped at the wrong moment
        with meeting:
            end = time.monotonic() + 20
            while not told and time.monotonic() < end:
                time.sleep(0.05)
            fcntl.flock(file, fcntl.LOCK_UN)
    assert len(told) == 1 and "the file that they meet at stays locked: one of them" in told[0]


class StoppedStore:
    """One whose host is stopped: a connection to it is not answered before it dies."""

    def __init__(self):
        self.died = threading.Event()

    def clone(self):
        self.died.wait()
        raise RuntimeError("the connection was closed")


def test_a_store_that_stops_before_a_rank_has_its_own_connection_is_named():
    told, store, before = [], StoppedStore(), threading.active_count()
    meeting = Meeting("a", store, 1, 2, timedelta(seconds=0.4), told.append)
    with meeting:
        end = time.monotonic() + 20
        while not told and time.monotonic() < end:
            time.sleep(0.05)
        store.died.set()
    assert len(told) == 1 and "the store that they meet at does not answer" in told[0]
    while threading.active_count() > before:
        time.sleep(0.01)


def test_a_meeting_that_ends_in_time_says_nothing():
    assert spawn(size_of, dp=2, meet=timedelta(seconds=60)) == [2, 2]


def size_of(mesh: Mesh) -> int:
    return mesh.world.size


def test_hosts_that_chose_different_backends_are_refused():
    store, few = dist.HashStore(), World(1, 4, 1, 2, "a", 1, "torchrun")
    for rank in (0, 3):
        check_backend(World(rank, 4, 1, 2, "a", 1, "torchrun"), store, "nccl", 2)
    with pytest.raises(ValueError, match="rank 1 would talk over gloo, .* with 1 GPUs for 2 ranks"):
        check_backend(few, store, "gloo", 1)
