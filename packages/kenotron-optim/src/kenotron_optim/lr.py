"""The learning rate of a step, as a pure function: nothing to save, nothing to resume.

Step i, counted from 1, is updated with the rate of step i, and that is what its log line prints.
"""

import math
from dataclasses import dataclass
from typing import Self

from kenotron_optim.config import DecayStyle, LRSchedulerConfig, WarmupStyle


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A learning-rate schedule with every default filled in; steps are counted from 1."""

    peak: float
    """Learning rate between warm-up and decay."""
    warmup_steps: int
    """Steps of the warm-up."""
    warmup_style: WarmupStyle
    """Shape of the warm-up."""
    decay_start: int
    """Last step with the full learning rate; without decay steps, the first without it."""
    decay_steps: int
    """Steps of the decay; `inverse-sqrt` and `constant` continue after them."""
    decay_style: DecayStyle
    """Shape of the decay."""
    floor: float
    """Lowest learning rate after the warm-up, and that after the decay."""

    @classmethod
    def from_config(cls, config: LRSchedulerConfig, train_steps: int) -> Self:
        """Fill in what the config leaves open.

        Args:
            config: the schedule, with None for "the usual".
            train_steps: steps of the whole training, counted from its first step (not from a
                resumed one).

        Returns:
            The schedule: without `lr_decay_starting_step` the decay follows the warm-up, without
            `lr_decay_steps` its last step is that of the training, also after a plateau, without
            `min_decay_lr` it stays level.

        Raises:
            ValueError: a negative number of steps.
        """
        if train_steps < 0:
            raise ValueError(f"train_steps {train_steps} was given; it must not be negative")
        start, steps = config.lr_decay_starting_step, config.lr_decay_steps
        start = config.lr_warmup_steps if start is None else start
        floor = config.min_decay_lr
        return cls(
            peak=config.learning_rate,
            warmup_steps=config.lr_warmup_steps,
            warmup_style=config.lr_warmup_style,
            decay_start=start,
            decay_steps=max(train_steps - start, 0) if steps is None else steps,
            decay_style=config.lr_decay_style,
            floor=config.learning_rate if floor is None else floor,
        )


def learning_rate(step: int, schedule: LRSchedule) -> float:
    """Give the learning rate that the update of one step uses.

    The linear warm-up reaches its peak in its last step and starts above 0, so no update is lost.
    The column over the steps is the one that Nanotron prints; there the update of step i uses the
    rate that line i - 1 prints, so that a warm-up begins with an update of rate 0.

    Args:
        step: number of the update, from 1.
        schedule: the filled-in schedule.

    Returns:
        The learning rate. With neither warm-up nor decay steps it is the peak for ever.
        `inverse-sqrt` is peak * sqrt(s / step) after step s = max(decay_start, 1), but at least the
        floor. Sources: cosine arXiv 1608.03983, inverse-sqrt 1706.03762, 1-sqrt 2405.18392, a
        plateau before the decay (WSD) 2404.06395.

    Raises:
        ValueError: the step is below 1.
    """
    if step < 1:
        raise ValueError(f"step {step} was given; steps are counted from 1")
    if step < schedule.warmup_steps and schedule.warmup_style == "linear":
        return schedule.peak * step / schedule.warmup_steps
    if step <= schedule.warmup_steps:
        return schedule.peak  # peak * n / n may be off by its last bit
    if schedule.decay_style == "constant" or step < schedule.decay_start:
        return schedule.peak
    if schedule.decay_style == "inverse-sqrt":
        start = max(schedule.decay_start, 1)
        return max(schedule.peak * math.sqrt(start / step), schedule.floor)
    if schedule.warmup_steps == schedule.decay_steps == 0:
        return schedule.peak
    past = step - schedule.decay_start
    if past >= schedule.decay_steps:
        return schedule.floor
    if past == 0:
        return schedule.peak
    share = _remaining(past / schedule.decay_steps, schedule.decay_style)
    # Rounding may lift the sum over the peak by its last bit.
    return min(schedule.floor + (schedule.peak - schedule.floor) * share, schedule.peak)


def _remaining(progress: float, style: DecayStyle) -> float:
    """Share of the way from floor to peak that is left after `progress` (0..1) of the decay."""
    if style == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if style == "1-sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress
