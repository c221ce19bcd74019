"""Numbers of a resumed run that differ because its config did: learning rate and seed."""

from __future__ import annotations

from kenotron_config import parse_config
from kenotron_optim import LRSchedule, learning_rate
from kenotron_train.progress import Progress


def changed_config(
    progress: Progress, schedule: LRSchedule, train_steps: int, seed: int, saved: str | None
) -> str:
    """Say what becomes of the learning rate of the next step and the seed; nothing of what stays.

    Args:
        progress: of the checkpoint.
        schedule: of the run that resumes it.
        train_steps: its last step.
        seed: its ``general.seed``.
        saved: text of the config that the checkpoint was trained with; without one: nothing.
    """
    try:
        before = parse_config(saved or "", "config.yaml", saved=True, warn=lambda _: None)
    except (OSError, ValueError):  # of another release, or with variables that are not here
        return ""
    said = ""
    if before.general.seed != seed:
        said = f"; general.seed changes from {before.general.seed} to {seed}: dropout draws "
        said += "other numbers"
    step, steps = progress.step + 1, (before.tokens.train_steps, train_steps)
    then = LRSchedule.from_config(before.optimizer.learning_rate_scheduler, steps[0])
    rates = [learning_rate(step - progress.schedule_start, each) for each in (then, schedule)]
    if rates[0] == rates[1] or step > steps[1]:
        return said
    why = f"tokens.train_steps changes from {steps[0]} to {steps[1]}"
    why = why if steps[0] != steps[1] else "optimizer.learning_rate_scheduler changes"
    return (
        f"{said}; the learning rate of step {step} is {rates[1]:.3g}, and would have been "
        f"{rates[0]:.3g}: {why}"
    )
