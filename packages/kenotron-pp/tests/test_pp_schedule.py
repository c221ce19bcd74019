"""Every schedule proven for all small sizes, without processes."""

from __future__ import annotations

import pytest

from kenotron_pp import Action, gpipe, one_f_one_b, simulate

SIZES = [(s, m) for s in range(1, 9) for m in range(1, 17)]


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_no_deadlock_and_the_known_number_of_ticks(schedule) -> None:
    for stages, microbatches in SIZES:
        trace = simulate(schedule, stages, microbatches)
        assert trace.ticks == 2 * (microbatches + stages - 1)
        expected = (stages - 1) / (microbatches + stages - 1)
        assert trace.bubble == pytest.approx(expected)


def test_1f1b_keeps_few_micro_batches_alive_and_gpipe_all() -> None:
    for stages, microbatches in SIZES:
        bounded = tuple(min(stages - stage, microbatches) for stage in range(stages))
        assert simulate(one_f_one_b, stages, microbatches).peak_live == bounded
        assert simulate(gpipe, stages, microbatches).peak_live == (microbatches,) * stages


def test_one_stage_alternates() -> None:
    assert " ".join(map(str, one_f_one_b(0, 1, 3))) == "F0 B0 F1 B1 F2 B2"
    assert " ".join(map(str, one_f_one_b(0, 2, 3))) == "F0 F1 B0 F2 B1 B2"
    assert " ".join(map(str, gpipe(0, 2, 2))) == "F0 F1 B0 B1"


@pytest.mark.parametrize("arguments", [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_sizes_out_of_range(arguments: tuple[int, int, int]) -> None:
    for schedule in (gpipe, one_f_one_b):
        with pytest.raises(ValueError, match="no schedule for stage"):
            schedule(*arguments)


def test_the_simulator_sees_a_deadlock() -> None:
    def backward_first(stage: int, n_stages: int, n_microbatches: int) -> list[Action]:
        return [*gpipe(stage, n_stages, n_microbatches)[::-1]]

    with pytest.raises(ValueError, match="deadlocks: stage 0 at B0, stage 1 at B0"):
        simulate(backward_first, 2, 1)


def test_the_simulator_sees_a_missing_micro_batch_and_a_wrong_order() -> None:
    with pytest.raises(ValueError, match=r"runs F of micro-batches \[0\]: each of 2 must"):
        simulate(lambda s, n, m: gpipe(s, n, m - 1), 2, 2)

    def swapped(stage: int, n_stages: int, n_microbatches: int) -> list[Action]:
        return [Action("F", 0), Action("F", 1), Action("B", 1), Action("B", 0)]

    with pytest.raises(ValueError, match=r"runs B of micro-batches \[1, 0\]"):
        simulate(swapped, 1, 2)
