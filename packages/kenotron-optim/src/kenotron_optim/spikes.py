"""Steps whose loss or gradient is far above that of the last ones, which a run may leave out.

The bound is the mean of the last values plus a number of their standard deviations, as in
OLMo-core's ``SkipStepOptimizer``. It is known before the step, so nothing waits for the device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kenotron_optim.config_fields import INFINITY, raise_all
from kenotron_optim.step_state import Policy, StepOutcome

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 1e-3
"""Least deviation, as a share of the mean: equal values bound those after them, too."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Bounds above which a loss or gradient norm is too large, and its step is left out.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    sigma: float = 6.0
    """Standard deviations above the mean of the window from which on a step is left out."""
    window: int = 128
    """Steps that the mean is taken of, the last ones; the first half of them is never left out."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not 0 < self.sigma < INFINITY:
            found.append(
                f"sigma: {self.sigma} was given; it must be finite and above 0; 6 is usual"
            )
        if self.window < 4:
            found.append(f"window: {self.window} was given; it must be at least 4; 128 is usual")
        raise_all(found)


@dataclass(frozen=True)
class SpikeGuard(Policy):
    """Losses and gradient norms of the last steps; the same on every rank."""

    name: ClassVar[str] = "spikes"
    config: SpikeConfig
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    @property
    def bounds(self) -> tuple[float, float]:
        """Largest loss and gradient norm of the next step; infinite in the first steps."""
        if len(self.norms) < self.config.window // 2:
            return math.inf, math.inf
        return _bound(self.losses, self.config.sigma), _bound(self.norms, self.config.sigma)

    def blocks(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Decide on the device whether a loss or a norm (scalars) is too large: a bool scalar."""
        most_loss, most_norm = self.bounds
        return (loss.double() > most_loss) | (norm > most_norm)

    def reason(self, loss: float, norm: float) -> str:
        """Return what is too large about a step, in words; empty if nothing is."""
        named = zip(("loss", "gradient norm"), (loss, norm), self.bounds, strict=True)
        rule = f"mean + {self.config.sigma:g} sigma of {len(self.norms)} steps"
        return "; ".join(f"{n} {x:.4g} > {most:.4g} ({rule})" for n, x, most in named if x > most)

    def after(self, result: StepOutcome) -> SpikeGuard:
        """Return the guard of the next step."""
        return self.seen(result.minimised, result.grad_norm)

    def seen(self, loss: float, norm: float) -> SpikeGuard:
        """Return the guard of the step that follows one with these numbers.

        What is above a bound counts as the bound: one spike hides no other, and a bound follows a
        lasting rise. Numbers that are not finite do not count.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self
        most_loss, most_norm = self.bounds
        kept = self.config.window - 1
        losses = (*self.losses[-kept:], min(loss, most_loss))
        return replace(self, losses=losses, norms=(*self.norms[-kept:], min(norm, most_norm)))

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def restored(self, saved: Mapping[str, Any]) -> SpikeGuard:
        """Undo ``to_dict``; of a longer window the last steps are kept.

        Raises ValueError where there are not as many losses as norms, or one is not finite.
        """
        losses, norms = (tuple(map(float, saved[name])) for name in ("losses", "norms"))
        if len(losses) != len(norms) or not all(map(math.isfinite, (*losses, *norms))):
            raise ValueError(
                f"spikes: the checkpoint has {len(losses)} losses and {len(norms)} gradient norms: "
                "as many of both are needed, all finite; resume from another checkpoint"
            )
        kept = self.config.window
        return SpikeGuard(self.config, losses[-kept:], norms[-kept:])


def _bound(values: Sequence[float], sigma: float) -> float:
    mean = statistics.fmean(values)
    return mean + sigma * max(statistics.stdev(values), LEAST * abs(mean))
