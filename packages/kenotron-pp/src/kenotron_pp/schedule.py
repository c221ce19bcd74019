"""Pipeline schedules as plain lists of actions: what one stage does, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch on one stage."""

    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule = Callable[[int, int, int], list[Action]]
"""(stage, number of stages, number of micro-batches) -> that stage's actions."""


def gpipe(stage: int, n_stages: int, n_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965; "AFAB").

    Simple, and every micro-batch's activations live until the backwards begin. Raises ValueError
    for a stage or counts out of range.
    """
    _check(stage, n_stages, n_microbatches)
    forwards = [Action("F", i) for i in range(n_microbatches)]
    return forwards + [Action("B", i) for i in range(n_microbatches)]


def one_f_one_b(stage: int, n_stages: int, n_microbatches: int) -> list[Action]:
    """A few forwards, then forward and backward in turn (Narayanan et al., arXiv 2104.04473).

    At most ``n_stages - stage`` micro-batches are alive at once, whatever their number; fewer
    micro-batches than stages are allowed. Raises ValueError for a stage or counts out of range.
    """
    _check(stage, n_stages, n_microbatches)
    warm_up = min(n_stages - 1 - stage, n_microbatches)
    actions = [Action("F", i) for i in range(warm_up)]
    for i in range(warm_up, n_microbatches):
        actions += [Action("F", i), Action("B", i - warm_up)]
    return actions + [Action("B", i) for i in range(n_microbatches - warm_up, n_microbatches)]


SCHEDULES: dict[str, Schedule] = {"afab": gpipe, "1f1b": one_f_one_b}
"""By the names used in configuration files."""


def _check(stage: int, n_stages: int, n_microbatches: int) -> None:
    if n_microbatches < 1 or n_stages < 1 or not 0 <= stage < n_stages:
        raise ValueError(
            f"no schedule for stage {stage} of {n_stages} with {n_microbatches} micro-batches: "
            "stages count from 0, and there is at least one micro-batch"
        )
