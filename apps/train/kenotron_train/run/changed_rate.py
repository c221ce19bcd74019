"""A learning rate that is another one in a resumed run than it would have been."""

from __future__ import annotations

from kenotron_config import Config, parse_config
from kenotron_optim import LRSchedule, learning_rate
from kenotron_train.progress import Progress


def changed_rate(progress: Progress, config: Config, saved: str | None) -> str:
    """Say what becomes of the learning rate of the next step; nothing where it stays.

    Args:
        progress: of the checkpoint.
        config: of the run that resumes it.
        saved: text of the config that the checkpoint was trained with; without one: nothing.
    """
    try:
        before = parse_config(saved or "", "config.yaml", warn=lambda _: None)
    except (OSError, ValueError):  # of another release, or with variables that are not here
        return ""
    step = progress.step + 1
    rates = [_rate(each, step - progress.schedule_start) for each in (before, config)]
    if rates[0] == rates[1] or step > config.tokens.train_steps:
        return ""
    steps = before.tokens.train_steps, config.tokens.train_steps
    why = f"tokens.train_steps changes from {steps[0]} to {steps[1]}"
    why = why if steps[0] != steps[1] else "optimizer.learning_rate_scheduler changes"
    return (
        f"; the learning rate of step {step} is {rates[1]:.3g}, and would have been "
        f"{rates[0]:.3g}: {why}"
    )


def _rate(config: Config, step: int) -> float:
    schedule = config.optimizer.learning_rate_scheduler
    return learning_rate(step, LRSchedule.from_config(schedule, config.tokens.train_steps))
