"""The loss scale by itself, and the words that ranks send along with the norm."""

from __future__ import annotations

import pytest
import torch

from kenotron_optim import LossScale, LossScaleConfig, unscale_


def test_it_halves_at_an_overflow_and_doubles_after_the_interval() -> None:
    scale = LossScale.start(LossScaleConfig(initial=8.0, growth_interval=3, maximum=16.0))
    factors = []
    for overflow in (False, True, False, False, False, False, False, False, False, False, False):
        scale = scale.stepped(overflow)
        factors.append(scale.factor)
    assert factors == [8, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16]


def test_it_never_falls_below_its_minimum() -> None:
    scale = LossScale.start(LossScaleConfig(initial=4.0, backoff=0.125, minimum=2.0))
    assert scale.may_overflow
    assert scale.stepped(True).factor == 2.0 and not scale.stepped(True).may_overflow


def test_it_is_restored_under_limits_that_changed() -> None:
    scale = LossScale(LossScaleConfig(), 4096.0, 17)
    assert LossScale.start(LossScaleConfig()).restored(scale.to_dict()) == scale
    low = LossScaleConfig(initial=8.0, maximum=16.0)
    assert LossScale.start(low).restored(scale.to_dict()).factor == 16.0
    with pytest.raises(ValueError, match="a factor is finite and above 0"):
        LossScale.start(low).restored({"factor": 0.0, "good_steps": 1})


def test_unscaling_keeps_every_bit_and_what_is_not_finite() -> None:
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    slices = {"a": drawn * 2.0**16, "b": torch.tensor([float("inf"), float("nan")])}
    unscale_(slices, 2.0**16)
    assert torch.equal(slices["a"], drawn)
    assert slices["b"].isinf()[0] and slices["b"].isnan()[1]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"initial": 1000.0}, "initial: 1000.0 was given; it must be a power of two"),
        ({"initial": float("inf")}, "initial: inf was given; it must be a power of two"),
        ({"backoff": 2.0}, "backoff: 2.0 was given; it must be below 1"),
        ({"growth_interval": 0}, "growth_interval: 0 was given; it must be at least 1"),
        ({"initial": 0.5}, "initial: 0.5 was given; it must be from minimum"),
    ],
)
def test_a_config_that_makes_no_sense(given: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        LossScaleConfig(**given)
