"""The first cause of a stall, from beats written by hand."""

import threading
import time

import pytest
import torch

from kenotron_dist import Axis, all_reduce, barrier
from kenotron_dist.diagnosis import Cause, PeerLost, StallReport
from kenotron_dist.diagnosis.hang_diagnosis import Beat, Inquiry, Seen
from kenotron_dist.in_flight import CallsInFlight, Ticket
from kenotron_dist.testing import on_ranks

NOW, PATIENCE = 100.0, 3.0


def ticket(number=1, ranks=(0, 1, 2), operation="all_reduce", axis="tp"):
    return Ticket(f"{axis}:{ranks}", axis, ranks, number, operation, "/home/me/step.py", 7)


def beat(*waits, last=None, ended="", **counts):
    """A beat of a rank that waits in `waits` and has issued those and `last`."""
    issued = [*waits, *([last] if last else [])]
    own = {t.channel: t.number for t in issued}
    shown = tuple((wait, 5.0) for wait in waits)
    return Beat(9, {**own, **counts}, shown, issued[-1] if issued else None, 12.0, ended)


def search(beats, rank=0, own=None, silent=(), stale=(), failed=False):
    """Who keeps `rank` waiting, when all others beat as given and some are silent or unheard."""
    seen = {}
    for peer, what in beats.items():
        changed = NOW - 10 if peer in silent else NOW - 0.1
        seen[peer] = Seen(what, changed, 0 if peer in stale else 1)
    own = own or ticket()
    seen[rank] = Seen(beat(own), NOW, 1)
    return Inquiry(seen, NOW, PATIENCE, NOW - 1, failed).search(rank, own)


def test_a_rank_that_calls_nothing_is_absent():
    earlier = ticket(3, (1, 3), "all_gather", "dp")
    cause = search({1: beat(last=earlier), 2: beat(ticket())}).verdict
    assert (cause.rank, cause.kind) == (1, "absent")
    assert cause.reason == (
        "rank 1 has not joined all_reduce #1 over tp (ranks 0, 1, 2), called at step.py:7: it has "
        "called nothing for 12.0 s, since all_gather #3 over dp (ranks 1, 3), called at step.py:7"
    )


def test_a_rank_that_has_declared_long_work_is_borne_unless_it_dies():
    saving = beat()._replace(doing="saving a checkpoint")
    assert search({1: saving, 2: beat(ticket())}).verdict is None
    assert search({1: saving, 2: beat(ticket())}, silent=[1]).verdict.kind == "silent"
    assert Beat.decode(saving.encode()) == saving


def test_waits_are_followed_to_a_rank_that_waits_for_nobody():
    on_2 = ticket(1, (1, 2), axis="pp")
    on_3 = ticket(1, (2, 3), axis="dp")
    found = search({1: beat(on_2), 2: beat(on_3), 3: beat()}, own=ticket(1, (0, 1)))
    assert (found.verdict.rank, found.verdict.kind) == (3, "absent")


def test_ranks_outside_the_own_group_are_asked_for_first():
    found = search({1: beat(ticket(1, (1, 2), axis="pp"))}, own=ticket(1, (0, 1)))
    assert found.verdict is None and found.unsure == {2}


def test_what_was_not_heard_since_proves_nothing_but_silence_does():
    beats = {1: beat(), 2: beat()}
    assert search(beats, stale=[1, 2]).verdict is None
    assert search(beats, stale=[1]).verdict is None  # rank 2 is absent, but rank 1 may be dead
    cause = search(beats, silent=[1], stale=[2]).verdict
    assert (cause.rank, cause.kind) == (1, "silent")
    assert "its heartbeat stands still for 10.0 s, last seen before its first" in cause.reason


def test_a_silent_rank_is_to_blame_even_if_it_had_joined():
    cause = search({1: beat(ticket()), 2: beat()}, silent=[1]).verdict
    assert (cause.rank, cause.kind) == (1, "silent")
    assert "last seen waiting in all_reduce #1 over tp" in cause.reason


def test_a_rank_that_never_beat_is_silent():
    cause = search({1: None, 2: beat(ticket())}, silent=[1]).verdict
    assert cause.reason.endswith("stands still for 10.0 s and never beat")


def test_a_rank_that_ended_is_to_blame_if_it_had_not_come():
    cause = search({1: beat(ended="finished"), 2: beat()}).verdict
    assert (cause.rank, cause.kind) == (1, "left")
    cause = search({1: beat(ended="finished"), 2: beat(ended="KeyError: 'a'")}).verdict
    assert (cause.rank, cause.kind) == (2, "failed")
    assert cause.reason == "rank 2 has ended (KeyError: 'a')"
    done = {1: beat(last=ticket(), ended="finished"), 2: beat()}
    assert search(done).verdict.rank == 2


def test_after_an_error_a_rank_that_left_is_to_blame_even_if_it_had_come():
    beats = {1: beat(last=ticket(), ended="finished"), 2: beat(ticket())}
    assert search(beats).verdict.kind == "joined"
    assert search(beats, failed=True).verdict.rank == 1


def test_the_one_rank_in_another_operation_is_to_blame():
    other = ticket(operation="all_gather")
    cause = search({1: beat(other), 2: beat(ticket())}).verdict
    assert (cause.rank, cause.kind) == (1, "mismatch")
    assert cause.reason.startswith("rank 1 alone entered all_gather: ranks entered different")
    seen_by_it = search({0: beat(ticket()), 2: beat(ticket())}, rank=1, own=other).verdict
    assert seen_by_it.rank == 1


def test_of_two_ranks_in_different_operations_neither_is_to_blame():
    own = ticket(ranks=(0, 1))
    cause = search({1: beat(ticket(ranks=(0, 1), operation="broadcast"))}, own=own).verdict
    assert (cause.rank, cause.kind) == (None, "mismatch")
    assert "rank 0 all_reduce" in cause.reason and "rank 1 broadcast" in cause.reason


def test_the_two_ends_of_a_transfer_match():
    sent, received = (ticket(ranks=(0, 1), operation=verb) for verb in ("send", "receive"))
    cause = search({1: beat(received)}, own=sent).verdict
    assert (cause.rank, cause.kind) == (None, "joined")
    assert cause.reason.startswith("all ranks have joined send #1 over tp")


def test_two_ranks_that_wait_for_one_another_are_both_named():
    cause = search({1: beat(ticket(ranks=(0, 1), axis="dp"))}, own=ticket(ranks=(0, 1))).verdict
    assert (cause.rank, cause.kind) == (None, "deadlock")
    assert "rank 0 in all_reduce #1 over tp" in cause.reason
    assert "rank 1 in all_reduce #1 over dp" in cause.reason


def test_in_a_circle_the_one_rank_that_has_not_come_is_to_blame():
    elsewhere = ticket(ranks=(0, 1), axis="dp")
    cause = search({1: beat(elsewhere), 2: beat(ticket())}).verdict
    assert (cause.rank, cause.kind) == (1, "deadlock")
    assert cause.reason.startswith("rank 1 alone has not come where it is awaited")


def test_beats_and_causes_survive_the_store():
    whole = beat(ticket(), last=ticket(4, (0, 9), axis="pp"), ended="finished")
    assert Beat.decode(whole.encode()) == whole
    assert Beat.decode(beat().encode()) == beat()
    cause = Cause(None, "deadlock", "…")
    assert Cause.decode(cause.encode()) == cause


def test_reports_are_one_sentence():
    report = StallReport(0, ticket(), 12.34, Cause(1, "absent", "rank 1 has not come"))
    told = "all_reduce #1 over tp (ranks 0, 1, 2), called at step.py:7"
    assert str(report) == f"rank 0 waits 12.3 s in {told}: rank 1 has not come"
    lost = PeerLost(report, "Connection closed by peer")
    assert lost.rank == 1 and lost.report is report
    assert str(lost) == f"rank 1 has not come; so {told}, failed: Connection closed by peer"


def test_long_lists_of_ranks_are_shortened():
    ranks = tuple(range(0, 64, 2))
    assert "(ranks 0, 2, 4, 6, 8, 10, 12, 14, ... 62: 32 in all)" in str(ticket(ranks=ranks))
    axes = [Axis("tp", 0, tuple(range(start, 64, 2))) for start in (0, 1)]
    assert axes[0].channel.startswith("tp:0..62/") and axes[0].channel != axes[1].channel
    assert Axis("tp", 0, (4, 5)).channel == "tp:4,5"


class Job:
    done = False

    def is_completed(self):
        return self.done


def test_work_of_a_device_is_waited_for_until_it_is_done():
    pulse, jobs = CallsInFlight(), [Job(), Job()]
    pulse.queued(ticket(1), lambda: jobs[0])
    assert pulse.waits() == []  # nobody watches, nothing is kept
    pulse.watched = True
    for number, job in enumerate(jobs, 1):
        pulse.queued(ticket(number), lambda job=job: job)
    assert [(w.ticket.number, w.on_device) for w in pulse.waits()] == [(1, True)]
    jobs[0].done = True
    assert [w.ticket.number for w in pulse.waits()] == [2]
    jobs[1].done = True
    assert pulse.waits() == []


def test_a_wait_is_shown_with_the_line_that_called_and_ends_with_its_error():
    pulse = CallsInFlight()
    issued = pulse.issue("tp:0,1", "tp", (0, 1), "broadcast")
    assert issued.site.startswith("test_dist_hang_diagnosis.py:") and issued.number == 1
    assert pulse.issue("tp:0,1", "tp", (0, 1), "broadcast").number == 2
    words = r"broadcast #1 over tp \(ranks 0, 1\), called at test_dist_\w+.py:\d+, failed: no"

    def fail():
        assert [wait.ticket for wait in pulse.waits()] == [issued]
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match=words):
        pulse.wait(issued, fail)
    assert pulse.waits() == []


def test_every_thread_waits_for_itself():
    pulse, inside, leave = CallsInFlight(), threading.Event(), threading.Event()
    mine, theirs = (pulse.issue(name, name, (0, 1), "send") for name in ("a", "b"))

    def other():
        inside.set()
        leave.wait()

    thread = threading.Thread(target=pulse.wait, args=(theirs, other))

    def own():
        thread.start()
        inside.wait()
        assert [wait.ticket for wait in pulse.waits()] == [mine, theirs]

    pulse.wait(mine, own)
    assert [wait.ticket for wait in pulse.waits()] == [theirs]
    leave.set()
    thread.join()


def one_comes_late(mesh):
    barrier(mesh.world)
    before = mesh.pulse.waited
    if mesh.rank == 0:
        time.sleep(0.5)
    all_reduce(torch.ones(3), mesh.world)
    return mesh.pulse.waited - before


def test_the_time_of_waits_adds_up():
    late, early = on_ranks(one_comes_late, dp=2)
    assert early > 0.45 and 0 < late < early
