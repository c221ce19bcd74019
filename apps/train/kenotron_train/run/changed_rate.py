"""A learning rate that is another one in a resumed run than it would have been."""

from __future__ import annotations

from kenotron_config import parse_config
from kenotron_optim import LRSchedule, learning_rate
from kenotron_train.progress import Progress


def changed_rate(
    progress: Progress, schedule: LRSchedule, train_steps: int, saved: str | None
) -> str:
    """Say what becomes of the learning rate of the next step; nothing where it stays.

    Args:
        progress: of the checkpoint.
        schedule: of the run that resumes it.
        train_steps: its last step.
        saved: text of the config that the checkpoint was trained with; without one: nothing.
    """
    try:
        before = parse_config(saved or "", "config.yaml", saved=True, warn=lambda _: None)
    except (OSError, ValueError):  # of another release, or with variables that are not here
        return ""
    step, steps = progress.step + 1, (before.tokens.train_steps, train_steps)
    then = LRSchedule.from_config(before.optimizer.learning_rate_scheduler, steps[0])
    rates = [learning_rate(step - progress.schedule_start, each) for each in (then, schedule)]
    if rates[0] == rates[1] or step > train_steps:
        return ""
    why = f"tokens.train_steps changes from {steps[0]} to {steps[1]}"
    why = why if steps[0] != steps[1] else "optimizer.learning_rate_scheduler changes"
    return (
        f"; the learning rate of step {step} is {rates[1]:.3g}, and would have been "
        f"{rates[0]:.3g}: {why}"
    )
