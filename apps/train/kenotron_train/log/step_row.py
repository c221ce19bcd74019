"""A step in one row of a terminal."""

from __future__ import annotations

import datetime
import math
from collections import deque

from kenotron_command import short

COLUMNS = 100
"""The longest row, in characters."""
STEPS = 20
"""The time that is left is reckoned from so many steps, the last ones."""


class StepRows:
    """Rows with step, loss, norm, learning rate, tokens a second and the time that is left.

    Args:
        steps: the number of the run's last step.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seconds: deque[float] = deque(maxlen=STEPS)

    def took(self, seconds: float) -> None:
        """Count a finished step, whether it gets a row or not."""
        self._seconds.append(seconds)

    def row(
        self,
        step: int,
        loss: float,
        norm: float,
        lr: float,
        speed: float,
        *,
        remark: str = "",
        columns: int = COLUMNS,
    ) -> str:
        """Return a row of at most ``COLUMNS`` characters.

        Args:
            step: number of the step.
            loss: its loss.
            norm: norm of its gradient.
            lr: its learning rate.
            speed: tokens a second, of all ranks.
            remark: what else is said.
            columns: width of the terminal; learning rate, then norm, then speed are left out where
                they do not fit.
        """
        width, most = len(str(self._steps)), min(columns, COLUMNS)
        parts = {
            "step": f"{step:>{width}}/{self._steps}",
            "loss": f"loss {short(loss):<5}",
            "norm": f"norm {short(norm):<6}",
            "lr": f"lr {short(lr):<8}",
            "speed": f"{short(speed):>5} tok/s",
            "left": self._left(step),
            "remark": remark,
        }
        for dropped in (None, "lr", "norm", "speed"):
            parts.pop(dropped or "", None)
            text = " | ".join(filter(None, parts.values())).rstrip()
            if len(text) <= most:
                return text
        return f"{text[: most - 3]}..."

    def _left(self, step: int) -> str:
        mean = sum(self._seconds) / max(1, len(self._seconds))
        seconds = mean * (self._steps - step)
        if step == self._steps:
            return "done"
        if not self._seconds or not math.isfinite(seconds) or seconds > 1e9:
            return "? left"
        return f"{datetime.timedelta(seconds=round(seconds))} left"
