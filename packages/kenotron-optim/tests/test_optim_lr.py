"""The learning rate of every step against columns that were printed by known-good runs."""

import pytest

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


def test_linear_decay_ends_at_the_minimum_in_the_last_step():
    rates = column(10, learning_rate=1e-3, lr_warmup_steps=2, min_decay_lr=1e-4)
    expected = [5e-4, 1e-3] + [1e-3 - 9e-4 * n / 8 for n in range(1, 9)]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert rates[2:4] == pytest.approx([8.875e-4, 7.75e-4])
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
    assert printed(rates)[:6] == ["0.0005"] + ["0.001"] * 5
    assert printed(rates)[6:] == ["0.0005", "0.000293", "0.000134", "0"]


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
