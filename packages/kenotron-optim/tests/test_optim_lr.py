"""The learning rate of every step against columns that were printed by known-good runs."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron_optim.config import LRSchedulerConfig
from kenotron_optim.lr import LRSchedule, learning_rate


def column(train_steps, **arguments):
    schedule = LRSchedule.from_config(LRSchedulerConfig(**arguments), train_steps)
    return [learning_rate(step, schedule) for step in range(1, train_steps + 1)]


def printed(values):
    return [f"{value:.3g}" for value in values]


def test_cosine_column_equals_the_printed_one_to_three_digits():
    rates = column(
        15,
        learning_rate=3e-4,
        lr_warmup_steps=2,
        lr_decay_style="cosine",
        lr_decay_steps=13,
        min_decay_lr=1e-5,
    )
    assert " ".join(printed(rates)) == (
        "0.00015 0.0003 0.000296 0.000283 0.000264 0.000237 0.000206 0.000172 0.000138 "
        "0.000104 7.26e-05 4.65e-05 2.66e-05 1.42e-05 1e-05"
    )


def test_linear_column_equals_the_printed_one():
    rates = column(10, learning_rate=1e-3, lr_warmup_steps=2, min_decay_lr=1e-4)
    assert " ".join(f"{rate:.4g}" for rate in rates) == (
        "0.0005 0.001 0.0008875 0.000775 0.0006625 0.00055 0.0004375 0.000325 0.0002125 0.0001"
    )
    assert rates[-1] == 1e-4


@pytest.mark.parametrize("decay_steps", [4, None])
def test_plateau_then_square_root_with_and_without_explicit_length(decay_steps):
    rates = column(
        10,
        learning_rate=1e-3,
        lr_warmup_steps=2,
        lr_decay_style="1-sqrt",
        lr_decay_starting_step=6,
        lr_decay_steps=decay_steps,
        min_decay_lr=0.0,
    )
    assert [f"{rate:.4g}" for rate in rates] == ["0.0005"] + ["0.001"] * 5 + [
        "0.0005", "0.0002929", "0.000134", "0",
    ]  # fmt: skip


def test_constant_warmup_is_the_peak_from_the_first_step():
    rates = column(
        4, learning_rate=1e-3, lr_warmup_steps=2, lr_warmup_style="constant", min_decay_lr=0.0
    )
    assert rates == [1e-3, 1e-3, 5e-4, 0.0]


def test_first_step_without_warmup_already_decays():
    assert column(4, learning_rate=1.0, min_decay_lr=0.0) == [0.75, 0.5, 0.25, 0.0]


def test_no_warmup_and_no_decay_is_constant_for_ever():
    schedule = LRSchedule.from_config(
        LRSchedulerConfig(learning_rate=2.0, lr_decay_steps=0, min_decay_lr=0.5), 10
    )
    assert [learning_rate(step, schedule) for step in (1, 10, 1000)] == [2.0, 2.0, 2.0]


def test_warmup_without_decay_steps_falls_to_the_minimum_at_once():
    rates = column(3, learning_rate=2.0, lr_warmup_steps=1, lr_decay_steps=0, min_decay_lr=0.5)
    assert rates == [2.0, 0.5, 0.5]


def test_without_minimum_the_rate_stays_level():
    assert column(5, learning_rate=2.0, lr_warmup_steps=2) == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_after_the_decay_the_minimum_holds():
    rates = column(
        6, learning_rate=2.0, lr_decay_steps=2, min_decay_lr=0.5, lr_decay_style="linear"
    )
    assert rates == [1.25, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_training_shorter_than_its_warmup_never_reaches_the_peak():
    assert column(2, learning_rate=1.0, lr_warmup_steps=4) == [0.25, 0.5]


def test_step_zero_is_refused():
    schedule = LRSchedule.from_config(LRSchedulerConfig(learning_rate=1.0), 10)
    with pytest.raises(ValueError, match="step 0 was given; steps are counted from 1"):
        learning_rate(0, schedule)


def test_a_negative_length_of_training_is_refused():
    with pytest.raises(ValueError, match="train_steps -1 was given; it must not be negative"):
        LRSchedule.from_config(LRSchedulerConfig(learning_rate=1.0), -1)


def test_inverse_square_root_follows_the_warmup_and_stops_at_its_minimum():
    rates = column(
        64, learning_rate=1.0, lr_warmup_steps=4, lr_decay_style="inverse-sqrt", min_decay_lr=0.3
    )
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert [rates[step - 1] for step in (16, 25, 36, 49, 64)] == [0.5, 0.4, 2 / 6, 0.3, 0.3]
    late = column(
        16,
        learning_rate=1.0,
        lr_decay_starting_step=4,
        lr_decay_style="inverse-sqrt",
        min_decay_lr=0.0,
    )
    assert late[:4] == [1.0] * 4 and late[-1] == 0.5
    first = column(4, learning_rate=1.0, lr_decay_style="inverse-sqrt", min_decay_lr=0.0)
    assert (first[0], first[3]) == (1.0, 0.5)


def test_constant_has_a_warmup_and_no_decay():
    rates = column(5, learning_rate=2.0, lr_warmup_steps=2, lr_decay_style="constant")
    assert rates == [1.0, 2.0, 2.0, 2.0, 2.0]


def by_the_table(step, warmup, style, shape, start, steps, peak, low):
    """Nanotron's column as it is written down, branch by branch."""
    if warmup == steps == 0:
        return peak
    if step <= warmup:
        return peak * step / max(warmup, 1) if style == "linear" else peak
    if step < start:
        return peak
    if step < start + steps:
        t = step - start
        share = {
            "cosine": (1 + math.cos(math.pi * t / steps)) / 2,
            "linear": (steps - t) / steps,
            "1-sqrt": 1 - math.sqrt(t / steps),
        }[shape]
        return low + (peak - low) * share
    return low


LENGTHS = st.integers(0, 40)
RATES = st.floats(1e-9, 10.0)
SHAPES = st.sampled_from(["linear", "cosine", "1-sqrt"])
STYLES = st.sampled_from(["linear", "constant"])


@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS, RATES, st.floats(0, 1), SHAPES, STYLES)
def test_every_column_is_nanotrons(train, warmup, plateau, steps, peak, share, shape, style):
    low, start = peak * share, warmup + plateau
    rates = column(
        train,
        learning_rate=peak,
        lr_warmup_steps=warmup,
        lr_warmup_style=style,
        lr_decay_style=shape,
        lr_decay_starting_step=start,
        lr_decay_steps=steps,
        min_decay_lr=low,
    )
    want = [
        by_the_table(step, warmup, style, shape, start, steps, peak, low)
        for step in range(1, train + 1)
    ]
    assert rates == pytest.approx(want, rel=1e-12, abs=peak * 1e-15)


@given(
    LENGTHS, LENGTHS, LENGTHS, st.none() | LENGTHS, RATES, st.floats(0, 1), STYLES,
    st.sampled_from(["linear", "cosine", "1-sqrt", "inverse-sqrt"]),
)  # fmt: skip
def test_rates_rise_then_fall_within_bounds_and_without_a_jump(
    train, warmup, plateau, steps, peak, share, style, shape
):
    steps = None if shape == "inverse-sqrt" else steps
    schedule = LRSchedule.from_config(
        LRSchedulerConfig(
            learning_rate=peak,
            lr_warmup_steps=warmup,
            lr_warmup_style=style,
            lr_decay_style=shape,
            lr_decay_starting_step=warmup + plateau,
            lr_decay_steps=steps,
            min_decay_lr=peak * share,
        ),
        train,
    )
    rates = [learning_rate(step, schedule) for step in range(1, 130)]
    before, after = rates[:warmup], rates[warmup:]
    assert all(0 < a <= b <= peak for a, b in pairwise([*before, peak]))
    assert all(peak >= a >= b >= schedule.floor for a, b in pairwise(after))
    assert all(b - a <= peak / warmup * 1.000001 for a, b in pairwise(before))
    start, length = schedule.decay_start, schedule.decay_steps
    if warmup:
        assert rates[warmup - 1] == peak
    if start and length:  # both joints of the decay are met exactly
        assert learning_rate(start, schedule) == peak
    if length and shape != "inverse-sqrt":
        assert learning_rate(start + length, schedule) == schedule.floor
        step = {"linear": 1 / length, "cosine": math.pi / 2 / length, "1-sqrt": length**-0.5}
        drop = max(a - b for a, b in pairwise([peak, *after]))
        assert drop <= (peak - schedule.floor) * step[shape] * 1.000001 + peak * 1e-12


@given(st.integers(0, 60), LENGTHS, st.integers(0, 60), RATES, SHAPES)
def test_a_decay_without_length_ends_with_the_training(train, warmup, start, peak, shape):
    start = max(start, warmup)
    rates = column(
        train,
        learning_rate=peak,
        lr_warmup_steps=warmup,
        lr_decay_style=shape,
        lr_decay_starting_step=start,
        min_decay_lr=peak / 10,
    )
    assert len(rates) == train
    if start < train:
        assert rates[-1] == peak / 10 < min(rates[warmup : max(start, 1) - 1], default=peak)


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt", "inverse-sqrt", "constant"])
@pytest.mark.parametrize("train", [0, 1])
def test_trainings_of_no_step_and_of_one(train, shape):
    assert len(column(train, learning_rate=1.0, lr_decay_style=shape)) == train
    if shape != "constant":
        rates = column(train, learning_rate=1.0, lr_decay_style=shape, min_decay_lr=0.0)
        assert rates == [1.0 if shape == "inverse-sqrt" else 0.0][:train]
