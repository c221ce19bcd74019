"""A stuck or dead peer is named on every rank that waits for it; nobody else is ever reported."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from dist_watched import LIMIT, Job, body

from kenotron_dist import STALLED, Mesh, all_gather, all_reduce, barrier, receive, spawn
from kenotron_dist.diagnosis import watch
from kenotron_dist.testing import free_port


@pytest.fixture
def run(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "kenotron_dist"])
    processes = []

    def start(scenario, ranks, reporting, port=0, seconds=20.0):
        """The reports of the ranks in `reporting`, and whether any other rank wrote one."""
        job = Job(tmp_path, ranks, port, tp=ranks)
        for rank in range(ranks):
            process = context.Process(target=body, args=(rank, job, scenario), daemon=True)
            process.start()
            processes.append(process)
        files = {rank: tmp_path / f"{rank}.json" for rank in reporting}
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(file.exists() for file in files.values()):
            time.sleep(0.05)
        return {int(file.stem): json.loads(file.read_text()) for file in tmp_path.glob("*.json")}

    yield start
    for process in processes:
        process.kill()
        process.join()


def killed_in_collective(mesh, job):
    for _ in range(3):
        barrier(mesh.world)
    time.sleep(0.5)  # a beat
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(torch.ones(100_000), mesh["tp"])


def test_a_killed_peer_is_named_by_all(run):
    found = run(killed_in_collective, 3, [0, 2])
    assert sorted(found) == [0, 2]
    for report in found.values():
        assert (report["kind"], report["culprit"]) == ("silent", 1)
        assert "rank 1 is stopped or dead: its heartbeat stands still" in report["text"]
        # The checks of DETAIL wait for the dead: then it is a stall, not an error.
        assert report.get("error") or os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
        assert "last seen after all_reduce #3 over pp_dp_cp_tp" in report["text"]
        assert (
            "all_reduce #1 over tp (ranks 0, 1, 2), called at test_dist_watchdog.py:"
            in (report["text"])
        )


def killed_far_away(mesh, job):
    left, right = mesh.subset("tp", (0, 1)), mesh.subset("tp", (1, 2))
    barrier(mesh.world)
    if mesh.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if right is not None:
        all_reduce(torch.ones(1), right)
    if left is not None:
        all_reduce(torch.ones(1), left)


def test_a_cascade_names_the_first_rank_that_was_lost(run):
    # Rank 1 gives up on rank 2; rank 0 only ever waits for rank 1.
    found = run(killed_far_away, 3, [0, 1])
    assert [found[rank]["culprit"] for rank in (0, 1)] == [2, 2]


def stopped(mesh, job):
    barrier(mesh.world)
    time.sleep(0.5)  # a beat
    if mesh.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_gather(torch.ones(3), mesh["tp"])


@pytest.mark.parametrize("where", ["file", "tcp"])
def test_a_stopped_peer_is_named_by_all(run, where):
    began = time.time()
    found = run(stopped, 3, [0, 1], port=free_port() if where == "tcp" else 0)
    assert sorted(found) == [0, 1]
    for report in found.values():
        assert (report["kind"], report["culprit"]) == ("silent", 2)
        assert report["when"] - began < LIMIT.total_seconds() + 10
        assert f"rank {report['rank']} waits" in report["text"]
        assert "last seen after all_reduce #1 over pp_dp_cp_tp" in report["text"]


def the_host_dies(mesh, job):
    barrier(mesh.world)
    if mesh.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    all_gather(torch.ones(3), mesh["tp"])


def the_host_stops(mesh, job):
    barrier(mesh.world)
    if mesh.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_gather(torch.ones(3), mesh["tp"])


@pytest.mark.parametrize("scenario", [the_host_dies, the_host_stops])
def test_the_loss_of_the_rank_that_hosts_the_store_is_told(run, scenario):
    found = run(scenario, 3, [1, 2], port=free_port())
    for rank in (1, 2):
        assert (found[rank]["kind"], found[rank]["culprit"]) == ("store", 0)
        assert "the store that ranks meet at is gone" in found[rank]["text"]


def skips_to_the_next_collective(mesh, job):
    pair = mesh.subset("tp", (0, 1))
    barrier(mesh.world)
    if mesh.rank != 1:
        all_reduce(torch.ones(1), mesh["tp"])
    if pair is not None:
        all_gather(torch.ones(2), pair)


def test_a_rank_that_went_on_to_another_group_is_named(run):
    found = run(skips_to_the_next_collective, 3, [0, 1, 2])
    for report in found.values():
        assert (report["kind"], report["culprit"]) == ("deadlock", 1)
        assert "rank 1 alone has not come where it is awaited" in report["text"]
        assert "rank 1 in all_gather #1 over tp[0, 1]" in report["text"]


def leaves_out_a_group(mesh, job):
    barrier(mesh.world)
    if mesh.rank != 1:
        mesh.subset("tp", (0, 1))
    else:
        time.sleep(20)


def test_a_rank_that_leaves_out_the_making_of_a_group_is_named(run):
    found = run(leaves_out_a_group, 3, [0])
    assert (found[0]["kind"], found[0]["culprit"]) == ("absent", 1)
    assert "new_group" in found[0]["text"]
    assert "test_dist_watchdog.py" in found[0]["text"]


def computes(mesh, job):
    barrier(mesh.world)
    if mesh.rank == 1:
        time.sleep(4.5)
    all_reduce(torch.ones(100_000), mesh["tp"])


def test_a_rank_that_computes_too_long_is_named_and_the_others_go_on(run, tmp_path):
    found = run(computes, 3, [0, 2])
    for rank in (0, 2):
        assert (found[rank]["kind"], found[rank]["culprit"]) == ("absent", 1)
        assert "rank 1 has not joined all_reduce #1 over tp" in found[rank]["text"]
        assert "it has called nothing for" in found[rank]["text"]
    end = time.monotonic() + 10
    kinds = []
    while time.monotonic() < end and kinds != ["done"] * 3:
        time.sleep(0.1)
        kinds = [json.loads(f.read_text())["kind"] for f in sorted(tmp_path.glob("*.json"))]
    assert kinds == ["done"] * 3


def waits_between_the_rounds(mesh, job):
    handle = all_reduce(torch.ones(100_000), mesh["tp"], async_op=True)
    if mesh.rank == 1:
        time.sleep(20)
    handle.wait()


def test_a_rank_that_does_not_wait_for_its_own_reduction_is_named(run):
    found = run(waits_between_the_rounds, 3, [0, 2])
    for rank in (0, 2):
        assert (found[rank]["kind"], found[rank]["culprit"]) == ("absent", 1)
        assert "all_reduce (second round) #2 over tp" in found[rank]["text"]


def everyone_computes(mesh, job):
    barrier(mesh.world)
    time.sleep(2.5)
    barrier(mesh.world)


def test_long_computing_with_nobody_waiting_is_not_reported(run):
    found = run(everyone_computes, 2, [0, 1])
    assert [found[rank]["kind"] for rank in (0, 1)] == ["done", "done"]


def never_sends(mesh, job):
    out = torch.zeros(2)
    if mesh.rank > 0:
        receive(out, mesh["tp"], mesh.rank - 1, tag=7).wait()
    else:
        time.sleep(20)


def test_a_receive_whose_sender_never_sends_is_followed_up_the_pipeline(run):
    found = run(never_sends, 3, [1, 2])
    for rank in (1, 2):
        assert (found[rank]["kind"], found[rank]["culprit"]) == ("absent", 0)
    assert (
        "rank 2 waits" in found[2]["text"]
        and "receive #1 over tp (ranks 1, 2)" in (found[2]["text"])
    )


def raises(mesh, job):
    barrier(mesh.world)
    if mesh.rank == 1:
        raise ValueError("no good")
    all_reduce(torch.ones(1), mesh["tp"])


def test_a_rank_that_failed_is_named_with_its_error(run):
    found = run(raises, 3, [0, 2])
    for rank in (0, 2):
        assert (found[rank]["kind"], found[rank]["culprit"]) == ("failed", 1)
        assert "rank 1 has ended (ValueError: no good)" in found[rank]["text"]
    assert found[1]["text"] == "ValueError: no good"


def default_action(mesh, folder):
    with open(f"{folder}/{mesh.rank}.txt", "w") as sys.stderr, watch(mesh, limit=LIMIT):
        if mesh.rank == 1:
            time.sleep(30)
        barrier(mesh.world)


def test_by_default_the_process_writes_a_line_and_leaves_with_a_documented_code(tmp_path):
    assert STALLED == 75
    with pytest.raises(RuntimeError, match=r"rank 0: exited: gave up \(exit code 75\)"):
        spawn(default_action, str(tmp_path), tp=2)
    line = (tmp_path / "0.txt").read_text()
    assert line.startswith("rank 0 waits") and line.count("\n") == 1


def quiet(mesh):
    for _ in range(2):
        with watch(mesh, limit=LIMIT) as watchdog:
            barrier(mesh.world)
        watchdog.close()
    names = [thread.name for thread in threading.enumerate()]
    try:
        all_reduce(torch.ones(2, dtype=torch.uint16), mesh.world, op="max")
    except RuntimeError as error:
        return names, str(error), mesh.pulse.on_error is None
    return names, "", False


def test_it_closes_cleanly_and_errors_are_plain_afterwards():
    for names, error, free in spawn(quiet, tp=2):
        assert not [name for name in names if name.startswith("kenotron")]
        assert "all_reduce #3 over pp_dp_cp_tp (ranks 0, 1), called at test_dist" in error
        assert free


def own_error(mesh):
    with watch(mesh, limit=LIMIT):
        try:
            all_reduce(torch.ones(2, dtype=torch.uint16), mesh.world, op="max")
        except RuntimeError as error:
            barrier(mesh["tp"])
            return type(error).__name__, str(error)
    return "", ""


def test_an_error_with_everybody_alive_blames_nobody():
    for kind, error in spawn(own_error, tp=2):
        assert kind == "RuntimeError" and "failed: " in error


def test_one_rank_needs_no_watchdog():
    with watch(Mesh.connect(), limit=LIMIT):
        assert not [t for t in threading.enumerate() if t.name.startswith("kenotron")]


def test_a_limit_must_be_positive():
    with pytest.raises(ValueError, match=r"limit 0:00:00 is not positive: give the longest"):
        watch(Mesh.connect(), limit=timedelta(0))
