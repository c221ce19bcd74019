"""Bounds of losses and gradient norms beyond which a step is left out."""

from __future__ import annotations

import math
import statistics

import pytest

from kenotron_optim import SpikeConfig, SpikeGuard

CONFIG = SpikeConfig(sigma=3, window=8)
VALUES = [1.0, 1.2, 0.9, 1.1]


def guard_after(values: list[float], config: SpikeConfig = CONFIG) -> SpikeGuard:
    guard = SpikeGuard(config)
    for value in values:
        guard = guard.seen(2 * value, value)
    return guard


def test_the_bound_is_mean_and_deviation_of_half_a_window() -> None:
    assert guard_after(VALUES[:3]).bounds == (math.inf, math.inf)
    bound = statistics.fmean(VALUES) + 3 * statistics.stdev(VALUES)
    guard = guard_after(VALUES)
    assert guard.bounds == pytest.approx((2 * bound, bound))
    assert guard.reason(2 * bound - 1e-6, bound - 1e-6) == ""
    assert guard.reason(2.0, 5.0) == f"gradient norm 5 > {bound:.4g} (mean + 3 sigma of 4 steps)"
    assert guard.reason(9.0, 1.0).startswith("loss 9 > ")


def test_a_spike_counts_as_its_bound_and_a_lasting_rise_is_followed() -> None:
    guard = guard_after(VALUES)
    once = guard.seen(2.0, 1e6)
    assert once.norms[-1] == guard.bounds[1] and once.bounds[1] < 2 * guard.bounds[1]
    left_out = 0
    while guard.reason(6.0, 3.0):
        guard, left_out = guard.seen(6.0, 3.0), left_out + 1
    assert 0 < left_out < 30
    assert guard_after([*VALUES, math.nan, math.inf]) == guard_after(VALUES)


def test_equal_values_have_a_bound_above_them_that_rises() -> None:
    guard = guard_after([1.0] * 8)
    assert guard.bounds == pytest.approx((2.006, 1.003))
    left_out = 0
    while guard.reason(2.2, 1.1):
        guard, left_out = guard.seen(2.2, 1.1), left_out + 1
    assert 0 < left_out < 40


def test_a_checkpoint_keeps_the_window() -> None:
    guard = guard_after(VALUES * 4)
    assert len(guard.norms) == 8
    assert SpikeGuard(CONFIG).restored(guard.to_dict()) == guard
    shorter = SpikeConfig(sigma=3, window=4)
    assert SpikeGuard(shorter).restored(guard.to_dict()).norms == guard.norms[-4:]
    with pytest.raises(ValueError, match="1 losses and 2 gradient norms: as many of both"):
        SpikeGuard(CONFIG).restored({"losses": [1.0], "norms": [1.0, 2.0]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sigma": 0.0}, "sigma: 0.0 was given; it must be finite and above 0"),
        ({"sigma": math.inf}, "sigma: inf was given"),
        ({"window": 3}, "window: 3 was given; it must be at least 4"),
    ],
)
def test_bad_arguments_are_named(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpikeConfig(**values)
