"""The learning rate of a step, as a pure function: nothing to save, nothing to resume."""

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
    """Last step with the full learning rate."""
    decay_steps: int
    """Steps of the decay."""
    decay_style: DecayStyle
    """Shape of the decay."""
    floor: float
    """Learning rate after the decay."""

    @classmethod
    def from_config(cls, config: LRSchedulerConfig, train_steps: int) -> Self:
        """Fill in what the config leaves open.

        Args:
            config: the schedule, with None for "the usual".
            train_steps: steps of the whole training, counted from its first step (not from a
                resumed one).

        Returns:
            The schedule: without `lr_decay_starting_step` the decay follows the warm-up, without
            `lr_decay_steps` it ends with the training, without `min_decay_lr` it stays level.
        """
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

    Args:
        step: number of the update, from 1.
        schedule: the filled-in schedule.

    Returns:
        The learning rate. With neither warm-up nor decay steps it is the peak for ever.

    Raises:
        ValueError: the step is below 1.
    """
    if step < 1:
        raise ValueError(f"step {step} was given; steps are counted from 1")
    if step <= schedule.warmup_steps:
        linear = schedule.warmup_style == "linear"
        return schedule.peak * step / schedule.warmup_steps if linear else schedule.peak
    if step <= schedule.decay_start or schedule.warmup_steps == schedule.decay_steps == 0:
        return schedule.peak
    past = step - schedule.decay_start
    if past >= schedule.decay_steps:
        return schedule.floor
    share = _remaining(past / schedule.decay_steps, schedule.decay_style)
    return schedule.floor + (schedule.peak - schedule.floor) * share


def _remaining(progress: float, style: DecayStyle) -> float:
    """Share of the way from floor to peak that is left after `progress` (0..1) of the decay."""
    if style == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if style == "1-sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress
