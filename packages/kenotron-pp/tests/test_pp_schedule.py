"""Every schedule proven for all small sizes, without processes."""

from __future__ import annotations

import pytest

from kenotron_pp import (
    SCHEDULES,
    Action,
    Schedule,
    Times,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_live,
    pipeline_time,
    rank_actions,
    schedule_named,
    simulate,
    zero_bubble_h1,
    zero_bubble_v,
)

SIZES = [(s, m) for s in range(1, 9) for m in range(1, 17)]
TWO_KINDS = [gpipe, *(interleaved(chunks) for chunks in range(1, 5))]
WITH_TRANSFER = Times(F=1.1, B=1.9, I=1.2, W=0.7, transfer=0.3)


@pytest.mark.parametrize(
    "schedule", [*TWO_KINDS, zero_bubble_h1, zero_bubble_v], ids=lambda schedule: schedule.name
)
def test_every_schedule_runs_at_every_size_whatever_the_times(schedule: Schedule) -> None:
    for ranks, microbatches in SIZES:
        trace = simulate(schedule, ranks, microbatches)
        slow = simulate(schedule, ranks, microbatches, WITH_TRANSFER)
        assert len(trace.timeline) == len(slow.timeline)
        assert trace.peak_live == slow.peak_live
        lists = rank_actions(schedule, ranks, microbatches)
        slow_time = pipeline_time(schedule, lists, WITH_TRANSFER)
        assert peak_live(lists) == trace.peak_live
        assert slow_time == (slow.ticks, slow.bubble)
        kinds = 3 if schedule.splits else 2
        assert len(trace.timeline) == kinds * ranks * microbatches * schedule.chunks
        assert trace.ticks >= 3 * microbatches * schedule.chunks + ranks - 1


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_the_known_number_of_ticks(schedule: Schedule) -> None:
    for ranks, microbatches in SIZES:
        trace = simulate(schedule, ranks, microbatches)
        assert trace.ticks == 3 * (microbatches + ranks - 1)
        expected = (ranks - 1) / (microbatches + ranks - 1)
        assert trace.bubble == pytest.approx(expected)


def test_interleaving_divides_the_bubble_where_each_rank_has_a_micro_batch() -> None:
    for ranks, microbatches in SIZES:
        for chunks in range(1, 5):
            trace = simulate(interleaved(chunks), ranks, microbatches)
            if microbatches >= ranks:
                assert trace.ticks == 3 * microbatches * chunks + 3 * (ranks - 1)


def test_zero_bubble_h1_has_a_third_of_the_bubble_at_the_memory_of_1f1b() -> None:
    for ranks, microbatches in SIZES:
        trace = simulate(zero_bubble_h1, ranks, microbatches)
        if microbatches >= ranks:
            assert trace.ticks == 3 * microbatches + ranks - 1
        most = max(simulate(one_f_one_b, ranks, microbatches).peak_live)
        assert max(trace.peak_kept) <= most
        assert trace.ticks <= simulate(one_f_one_b, ranks, microbatches).ticks


def test_zero_bubble_v_has_hardly_any_at_the_memory_of_1f1b() -> None:
    for ranks, microbatches in SIZES:
        trace = simulate(zero_bubble_v, ranks, microbatches)
        if microbatches >= ranks:
            least = 6 * microbatches + ranks - 1  # all work, and the last rank's first wait
            assert trace.ticks <= least + 5
        assert max(trace.peak_kept) <= 2 * ranks  # halves of a stage
        assert trace.ticks <= 2 * simulate(one_f_one_b, ranks, microbatches).ticks
    for microbatches in range(8, 17):  # an activation is reserved for the second chunk
        assert simulate(zero_bubble_v, 4, microbatches).ticks == 6 * microbatches + 3


def test_1f1b_keeps_few_micro_batches_alive_and_gpipe_all() -> None:
    for ranks, microbatches in SIZES:
        bounded = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
        assert simulate(one_f_one_b, ranks, microbatches).peak_live == bounded
        assert simulate(gpipe, ranks, microbatches).peak_live == (microbatches,) * ranks


def test_one_rank_alternates() -> None:
    assert " ".join(map(str, one_f_one_b(0, 1, 3))) == "F0 B0 F1 B1 F2 B2"
    assert " ".join(map(str, one_f_one_b(0, 2, 3))) == "F0 F1 B0 F2 B1 B2"
    assert " ".join(map(str, gpipe(0, 2, 2))) == "F0 F1 B0 B1"
    assert " ".join(map(str, zero_bubble_h1(1, 2, 3))) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"
    assert " ".join(map(str, interleaved(2)(0, 1, 2))) == "F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1"


def test_times_may_differ_between_stages_and_weights_may_stay_in_i() -> None:
    uneven = simulate(gpipe, 2, 1, Times(F=[1, 3], B=[2, 6], transfer=0.5))
    assert uneven.ticks == 1 + 0.5 + 3 + 6 + 0.5 + 2
    split = simulate(zero_bubble_h1, 2, 4)
    whole = simulate(zero_bubble_h1, 2, 4, Times(unsplit=frozenset({0, 1})))
    assert split.ticks < whole.ticks == simulate(one_f_one_b, 2, 4).ticks
    assert split.peak_deferred == (1, 2) and whole.peak_deferred == (0, 0)


def test_places_of_stages() -> None:
    for schedule in (interleaved(3), zero_bubble_v, gpipe):
        for ranks in range(1, 6):
            for stage in range(ranks * schedule.chunks):
                assert schedule.stage(*schedule.place(stage, ranks), ranks) == stage
    assert zero_bubble_v.place(3, 3) == (2, 1) and interleaved(2).place(3, 3) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2, 1), "rank is 2, but ranks count from 0: give one of 0 to 1"),
        ((-1, 2, 1), "rank is -1, but ranks count from 0: give one of 0 to 1"),
        ((0.5, 2, 1), "rank is 0.5, but ranks count from 0: give one of 0 to 1"),
        ((0, 0, 1), "ranks is 0: give a whole number of at least 1"),
        ((0, 1, 0), "microbatches is 0: give a whole number of at least 1"),
        ((0, 1, -3), "microbatches is -3: give a whole number of at least 1"),
        ((0, 1, 2.0), "microbatches is 2.0: give a whole number of at least 1"),
    ],
)
def test_sizes_out_of_range(arguments: tuple[int, int, int], words: str) -> None:
    for schedule in SCHEDULES.values():
        with pytest.raises(ValueError, match=f"schedule {schedule.name}: {words}"):
            schedule(*arguments)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "words"),
    [
        (0, 4, "simulate: n_ranks is 0: give a whole number of at least 1"),
        (-2, 4, "simulate: n_ranks is -2: give a whole number of at least 1"),
        (2.5, 4, "simulate: n_ranks is 2.5: give a whole number of at least 1"),
        (4, 0, "simulate: n_microbatches is 0: give a whole number of at least 1"),
        (4, None, "simulate: n_microbatches is None: give a whole number of at least 1"),
    ],
)
def test_the_simulator_refuses_counts_below_one(ranks: int, microbatches: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(one_f_one_b, ranks, microbatches)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"F": -1}, "F is -1: give a finite number from 0 up, or a list of one for each stage"),
        ({"B": NAN}, "B is nan: give a finite number"),
        ({"I": INFINITY}, "I is inf: give a finite number"),
        ({"F": 10**400}, "F is 10{400}: give a finite number"),
        ({"W": "1"}, "W is '1': give a finite number"),
        ({"W": None}, "W is None: give a finite number"),
        ({"F": [1, 2, -3, 4]}, "F of stage 2 is -3: give a finite number"),
        ({"B": (1, NAN, 1, 1)}, "B of stage 1 is nan: give a finite number"),
        ({"transfer": -0.5}, "transfer is -0.5: give a finite number from 0 up$"),
        ({"transfer": [1, 1]}, r"transfer is \[1, 1\]: give a finite number from 0 up$"),
        ({"unsplit": 3}, "unsplit is 3: give a set of stage numbers"),
    ],
)
def test_times_that_are_none(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"^Times: {words}"):
        Times(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"F": [1] * 3}, r"F has 3 times, and there are 4 stages \(ranks x chunks\): give one for"),
        ({"W": [1] * 5}, "W has 5 times, and there are 4 stages"),
        ({"B": []}, "B has 0 times, and there are 4 stages"),
        ({"unsplit": {0, 4}}, "unsplit has stage 4, and there are 4 .*: give stages of 0 to 3"),
        ({"unsplit": {-1}}, "unsplit has stage -1, and there are 4 .*: give stages of 0 to 3"),
    ],
)
def test_times_of_other_stages(given: dict, words: str) -> None:
    for schedule in (interleaved(2), zero_bubble_v):
        with pytest.raises(ValueError, match=f"^Times: {words}"):
            simulate(schedule, 2, 4, Times(**given))


def test_times_at_the_ends_of_what_a_number_can_be() -> None:
    with pytest.raises(ValueError, match="times of 2 ranks add up to inf: give Times in a larger"):
        simulate(gpipe, 2, 1, Times(F=1e308, B=1e308))
    for times in (Times(0, 0, 0, 0), Times(5e-324, 0, 5e-324), Times(1e-300, 1e300, 1e300, 1)):
        for schedule in SCHEDULES.values():
            assert 0 <= simulate(schedule, 3, 5, times).bubble <= 1


def test_what_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="'1f1b' is no schedule: give a Schedule, such as schedu"):
        simulate("1f1b", 2, 2)


def test_names() -> None:
    assert schedule_named("1f1b") is one_f_one_b
    assert schedule_named("interleaved", 3).chunks == 3
    assert schedule_named("interleaved", 1) is one_f_one_b
    assert schedule_named("zb-v", 2) is zero_bubble_v
    with pytest.raises(ValueError, match="no schedule '2f2b': choose one of afab, 1f1b"):
        schedule_named("2f2b")
    with pytest.raises(ValueError, match="'zb-h1' has 1 chunks a rank, 2 were given"):
        schedule_named("zb-h1", 2)
    for chunks in (0, -1, 1.5):
        words = f"interleaved: chunks is {chunks}: give a whole number of at least 1"
        with pytest.raises(ValueError, match=words):
            schedule_named("interleaved", chunks)
    with pytest.raises(ValueError, match="schedule own: chunks is 0: give a whole number of at le"):
        Schedule("own", gpipe.order, chunks=0)


def test_the_simulator_sees_a_deadlock() -> None:
    def backward_first(stage: int, n_stages: int, n_microbatches: int) -> list[Action]:
        return [*gpipe(stage, n_stages, n_microbatches)[::-1]]

    with pytest.raises(ValueError, match="backward_first deadlocks: rank 0 at B0, rank 1 at B0"):
        simulate(backward_first, 2, 1)


def test_the_simulator_sees_a_missing_micro_batch_and_a_wrong_order() -> None:
    with pytest.raises(ValueError, match=r"runs F of chunk 0 on micro-batches \[0\]: each of 2"):
        simulate(lambda s, n, m: gpipe(s, n, m - 1), 2, 2)

    def swapped(stage: int, n_stages: int, n_microbatches: int) -> list[Action]:
        return [Action("F", 0), Action("F", 1), Action("B", 1), Action("B", 0)]

    with pytest.raises(ValueError, match=r"runs B of chunk 0 on micro-batches \[1, 0\]"):
        simulate(swapped, 1, 2)

    def late(stage: int, n_stages: int, n_microbatches: int) -> list[Action]:
        own = zero_bubble_h1(stage, n_stages, n_microbatches)
        weights = [action for action in own if action.kind == "W"][::-1]
        return [action for action in own if action.kind != "W"] + weights

    with pytest.raises(ValueError, match=r"runs W of chunk 0 on micro-batches \[1, 0\]"):
        simulate(Schedule("late", late, splits=True), 2, 2)
    with pytest.raises(ValueError, match=r"runs I0: it has kinds F, B and 1 chunks"):
        simulate(lambda s, n, m: zero_bubble_h1(s, n, m), 1, 1)
