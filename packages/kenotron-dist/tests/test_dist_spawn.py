"""Local ranks: results in order, the first cause, and nobody left behind."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kenotron_dist import Mesh, RankError, all_reduce, barrier, spawn
from kenotron_dist.spawn import _collect
from kenotron_dist.testing import PRELOAD, on_ranks


def alive(pid):
    """Say whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=5):
    """Wait for processes to leave."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def nested(mesh, tensor, extra):
    tensor += mesh.rank  # a copy: neither the caller nor another rank sees this
    barrier(mesh.world)
    kept = torch.nn.Parameter(tensor * 2)
    return {"coords": mesh.coords, "x": [tensor, (kept, None)], "extra": extra, "pid": os.getpid()}


def test_results_come_in_rank_order_and_data_is_copied():
    x = torch.zeros(3)
    found = on_ranks(nested, x, {"a": (1, "b")}, dp=2, tp=2)
    assert [each["coords"] for each in found] == [
        {"pp": 0, "dp": dp, "cp": 0, "tp": tp} for dp in range(2) for tp in range(2)
    ]
    for rank, each in enumerate(found):
        assert each["x"][0].tolist() == [rank] * 3
        assert each["x"][1][0].tolist() == [2 * rank] * 3
        assert each["extra"] == {"a": (1, "b")}
    assert x.tolist() == [0, 0, 0] and not x.is_shared()
    assert gone([each["pid"] for each in found], 0)


def facts(mesh):
    return torch.get_num_threads(), dist.get_backend(), dist.get_world_size()


@pytest.mark.gloo(reason="it names the backend")
def test_ranks_have_one_thread_unless_told():
    assert on_ranks(facts) == [(1, "gloo", 1)]
    assert spawn(facts, threads=2, tp=2, preload=PRELOAD) == [(2, "gloo", 2)] * 2


def large(mesh):
    return torch.ones(3_000_000) * mesh.rank


def test_large_results_arrive():
    assert [x.mean().item() for x in on_ranks(large, tp=2)] == [0, 1]


def fails(mesh, who, how, path):
    """One rank does something bad while the others wait for it, or after they were done."""
    Path(path, str(mesh.rank)).write_text(str(os.getpid()))
    barrier(mesh.world)
    if mesh.rank == who:
        how()
    if how is not late:
        all_reduce(torch.ones(100_000), mesh.world)
    return mesh.rank


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_at_once():
    os._exit(3)


def leave_silently():
    os._exit(0)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def divide():
    return 1 / 0


def late():
    time.sleep(0.2)
    raise KeyError("késő")


def exit_by_system():
    sys.exit("enough")


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (divide, "ZeroDivisionError", "rank 1: ZeroDivisionError: division by zero"),
        (late, "KeyError", "rank 1: KeyError: 'késő'"),
        (exit_by_system, "SystemExit", "rank 1: SystemExit: enough"),
        (kill, "killed", "rank 1: killed: died of SIGKILL"),
        (leave_at_once, "exited", "rank 1: exited: left with exit code 3 before it was done"),
        (leave_silently, "exited", "rank 1: exited: left with exit code 0 before it was done"),
    ],
)
def test_the_first_cause_is_named_and_all_ranks_end(how, kind, words, tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        on_ranks(fails, 1, how, tmp_path, tp=3)
    assert time.monotonic() - start < 10
    assert str(error.value) == words
    assert (error.value.rank, error.value.kind) == (1, kind)
    died = kind in ("killed", "exited")
    assert (error.value.trace == "") == died
    assert died or how.__name__ in error.value.trace
    assert died or "On rank 1: Traceback" in error.value.__notes__[0]
    assert gone([int(file.read_text()) for file in tmp_path.iterdir()], 0)
    assert not multiprocessing.active_children()


def test_a_killed_rank_is_always_the_cause_never_its_peers(tmp_path):
    for _ in range(2):
        for who in (0, 3):
            with pytest.raises(RankError, match=f"rank {who}: killed: died of SIGKILL"):
                on_ranks(fails, who, kill, tmp_path, tp=4)


def returns_early(mesh: Mesh, who: int) -> None:
    if mesh.rank != who:
        all_reduce(torch.ones(1), mesh["tp"])


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_returned_while_others_wait_is_named_within_seconds(who):
    start = time.monotonic()
    with pytest.raises(
        RankError, match=f"PeerLost: rank {who} has returned, and this rank"
    ) as error:
        spawn(returns_early, who, tp=3)
    assert time.monotonic() - start < 20
    assert "all_reduce #1 over tp" in str(error.value)
    assert "returns_early" in error.value.trace


def joins_and_returns(mesh: Mesh) -> float:
    """Rank 1 returns while its part is on its way; rank 2 comes late, rank 0 waits for it."""
    time.sleep(4.0 if mesh.rank == 2 else 0.0)
    handle = all_reduce(torch.ones(1), mesh["tp"], async_op=True)
    return 0.0 if mesh.rank == 1 else float(handle.wait())


def test_a_rank_that_joined_and_returned_is_not_blamed():
    assert spawn(joins_and_returns, tp=3) == [3.0, 0.0, 3.0]


def abort():
    os.abort()


def test_an_abort_says_how_to_find_its_cause(tmp_path):
    with pytest.raises(RankError, match="SIGABRT; gloo aborts .* KENOTRON_DEBUG=collectives"):
        on_ranks(fails, 1, abort, tmp_path, tp=2)


class Dead:
    """A process that SIGKILL has ended."""

    exitcode = -9

    def join(self, timeout=None):
        """It has ended."""


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_a_death_goes_before_the_error_it_made_elsewhere_also_when_heard_later(late):
    pipes, ends = zip(*(multiprocessing.Pipe() for _ in range(3)), strict=True)
    ends[0].send_bytes(pickle.dumps((True, ("RuntimeError", "Connection closed", "trace"))))
    timer = threading.Timer(late, ends[1].close)  # rank 2 says nothing
    timer.start()
    with pytest.raises(RankError, match="rank 1: killed: died of SIGKILL"):
        _collect(list(pipes), [Dead()] * 3)
    timer.join()
    for pipe in (*pipes, *ends):
        pipe.close()


@pytest.mark.gloo(reason="it reads the words of gloo's error")
def test_a_stopped_rank_is_cleared_away(tmp_path):
    with pytest.raises(RankError, match="(?s)RuntimeError: .*1000 ?ms") as error:
        on_ranks(fails, 1, stop, tmp_path, seconds=1, tp=2)
    assert error.value.rank == 0
    assert gone([int(file.read_text()) for file in tmp_path.iterdir()], 0)


def returns_a_lambda(mesh):
    return lambda: 0


def test_what_cannot_be_pickled_is_an_error_that_says_so(tmp_path):
    with pytest.raises(RankError, match="rank 0: TypeError: spawn: the result cannot be pickled"):
        on_ranks(returns_a_lambda)
    with pytest.raises(
        TypeError, match="spawn: the function or an argument cannot be pickled .*<lambda>"
    ):
        on_ranks(lambda mesh: 0, tp=2)
    with pytest.raises(
        TypeError, match="spawn: the function or an argument cannot be pickled .*lock"
    ):
        on_ranks(facts, threading.Lock())


class Fragile:
    """A result that only its own process can read."""

    def __reduce__(self):
        return _rebuilt, (os.getpid(),)


def _rebuilt(pid):
    if os.getpid() != pid:
        raise EOFError("not my process")


def returns_what_is_fragile(mesh):
    return Fragile() if mesh.rank == 1 else 0


def test_a_result_that_the_caller_cannot_read_names_its_rank():
    with pytest.raises(
        RankError, match=r"rank 1: EOFError: .* unpickled .*not my process"
    ) as error:
        on_ranks(returns_what_is_fragile, tp=2)
    assert error.value.rank == 1 and error.value.is_any(EOFError)
    assert isinstance(error.value.__cause__, EOFError)


def spawns(mesh):
    spawn(facts)


def test_a_rank_cannot_spawn():
    words = "rank 0: RuntimeError: spawn: this process is a rank of spawn.*: call the function with"
    with pytest.raises(RankError, match=words):
        on_ranks(spawns)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match="spawn: an axis has at least one rank, got {'dp': 0}"):
        spawn(facts, dp=0)
    with pytest.raises(ValueError, match="spawn: an axis has at least one rank, got {'tp': -2}"):
        spawn(facts, tp=-2)
    with pytest.raises(RankError, match="rank 0: TypeError: facts.. takes 1 positional argument"):
        on_ranks(facts, 5)


def slow(mesh, path):
    Path(path, str(mesh.rank)).write_text(str(os.getpid()))
    if mesh.rank == 0:
        time.sleep(60)
    barrier(mesh.world)


def wait_for_pids(folder, count):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        texts = [file.read_text() for file in folder.iterdir() if file.name.isdecimal()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise TimeoutError


@pytest.fixture
def ctrl_c():
    """Python's own handler: a program started in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_all_ranks(tmp_path, ctrl_c):
    def interrupt():
        wait_for_pids(tmp_path, 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        on_ranks(slow, tmp_path, tp=2)
    thread.join()
    assert time.monotonic() - start < 10
    assert gone(wait_for_pids(tmp_path, 2), 0)


PROGRAM = textwrap.dedent("""
    import os, signal, sys, time
    from pathlib import Path
    from kenotron_dist import barrier, spawn

    def work(mesh, folder):
        Path(folder, str(mesh.rank)).write_text(str(os.getpid()))
        time.sleep(60 if mesh.rank == 0 else 0)
        barrier(mesh.world)

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        spawn(work, sys.argv[1], tp=2)
""")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_leave_when_their_parent_is_gone(number, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    parent = subprocess.Popen(
        [sys.executable, program, tmp_path], start_new_session=True, stderr=subprocess.PIPE
    )
    pids = wait_for_pids(tmp_path, 2)
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)  # as Ctrl-C does: the parent and its ranks
    else:
        parent.kill()
    _, stderr = parent.communicate(timeout=20)
    assert gone(pids)
    assert stderr.decode().count("Traceback") == (1 if number == signal.SIGINT else 0)


@pytest.mark.gloo(reason="it reads the words of gloo's error")
def test_a_slow_peer_is_waited_for_only_so_long(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 1: RuntimeError: .*500 ?ms"):
        spawn(slow, tmp_path, tp=2, timeout=timedelta(seconds=0.5), preload=PRELOAD)
    assert time.monotonic() - start < 10
