"""Reaction to a step whose loss or gradient is not finite: an error, or it is left out.

The decision follows from numbers that are equal on all ranks, and so is equal on all ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from kenotron_optim.accumulate import Slices
from kenotron_optim.clip import GlobalNorm
from kenotron_optim.config import NonFinitePolicy

FIX = (
    "lower the learning rate, look at the data of this step, or resume from an earlier checkpoint; "
    "`nonfinite: skip` leaves such steps out"
)
SHOWN = 8
"""Ranks that a message lists."""


class NonFiniteStep(FloatingPointError):
    """A step that is not finite, where the policy is ``error``. ``found`` says what is not."""

    def __init__(self, text: str, found: NonFinite) -> None:
        super().__init__(text)
        self.found = found


@dataclass(frozen=True)
class NonFinite:
    """The first gradient that is not finite, or a loss that alone is not."""

    loss: float
    name: str | None
    """Logical name; None when every gradient is finite. First by name, numbers in names compared
    as numbers: ``layers.2`` is before ``layers.10``."""
    held: str = ""
    """``nan`` (and possibly inf), or ``inf``."""
    ranks: tuple[int, ...] = ()
    """Ranks of the mesh whose slices of it hold such elements: its owners, not the cause."""
    others: int = 0
    """Further parameters with a gradient that is not finite."""

    def __str__(self) -> str:
        """Say what was found, as the beginning of a sentence."""
        if self.name is None:
            return f"the loss is {self.loss}, though every gradient is finite"
        ranks = ", ".join(map(str, self.ranks[:SHOWN])) + ", ..." * (len(self.ranks) > SHOWN)
        others = f", and {self.others} more are not finite" if self.others else ""
        return (
            f"the gradient of {self.name!r} holds {self.held} on "
            f"rank{'s' * (len(self.ranks) > 1)} {ranks}{others} (loss {self.loss})"
        )


def find_nonfinite(
    norm: GlobalNorm, slices: Slices, value: Tensor | float, loss: float
) -> NonFinite | None:
    """Find what is not finite in a step; None when all is.

    Collective over the mesh when there is something to find, and then the same on every rank.

    Args:
        norm: measures the gradient.
        slices: this rank's slices of the gradient.
        value: ``norm(slices)``, a scalar.
        loss: the same on every rank.
    """
    if math.isfinite(float(value)):
        return None if math.isfinite(loss) else NonFinite(loss, None)
    powers = norm.by_rank(slices).cpu()
    bad = ~powers.isfinite()
    names = sorted((norm.names[i] for i in bad.any(0).nonzero().flatten().tolist()), key=_natural)
    first = norm.names.index(names[0])
    ranks = tuple(bad[:, first].nonzero().flatten().tolist())
    held = "nan" if powers[:, first].isnan().any() else "inf"
    return NonFinite(loss, names[0], held, ranks, len(names) - 1)


def allows_update(found: NonFinite | None, policy: NonFinitePolicy, step: int) -> bool:
    """Return whether parameters are updated in this step.

    ``skip`` leaves them and all state alone, and so does ``rollback``: going back is up to the
    caller. Raises NonFiniteStep naming step, parameter and rank when something was found and the
    policy is ``error``, ValueError for an unknown policy.
    """
    if policy not in get_args(NonFinitePolicy):
        known = ", ".join(get_args(NonFinitePolicy))
        raise ValueError(f"the policy for steps that are not finite is {policy!r}: choose {known}")
    if found is not None and policy == "error":
        raise NonFiniteStep(f"step {step}: {found}: {FIX}", found)
    return found is None or policy == "continue"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts digits in a name as numbers."""
    parts = enumerate(re.split(r"([0-9]+)", name))  # every second one is a number
    return [(int(part), "") if i % 2 else (0, part) for i, part in parts]
