"""Dynamic loss scaling for float16 (Micikevicius et al., arXiv 1710.03740).

Gradients below 6e-8 vanish in float16. So a multiple of the loss is differentiated, and gradients
are divided by the same factor once they are added up in float32. The factor grows until gradients
overflow; such a step is left out and the factor made smaller. Factors are powers of two: where
nothing overflows or vanishes, scaling changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kenotron_optim.accumulate import Slices
from kenotron_optim.config import LossScaleConfig
from kenotron_optim.step_state import Policy, StepOutcome


@dataclass(frozen=True)
class LossScale(Policy):
    """The factor of the next step; the same on every rank, for all see the same gradient norm."""

    name: ClassVar[str] = "loss_scale"
    config: LossScaleConfig
    factor: float
    """Factor of the loss."""
    good_steps: int = 0
    """Steps without overflow since the factor last changed."""

    @classmethod
    def start(cls, config: LossScaleConfig) -> LossScale:
        """As a fresh run begins."""
        return cls(config, config.initial)

    @property
    def loss_factor(self) -> float:
        """Factor of the loss."""
        return self.factor

    @property
    def may_overflow(self) -> bool:
        """True where an overflow may be the scale's fault."""
        return self.factor > self.config.minimum

    def after(self, result: StepOutcome) -> LossScale:
        """Return the scale of the next step; causes other than the scale leave it alone."""
        if not result.is_finite and not result.overflow:
            return self
        return self.stepped(result.overflow)

    def stepped(self, overflow: bool) -> LossScale:
        """Return the scale of the step that follows one whose gradient did or did not overflow."""
        config = self.config
        if overflow:
            return LossScale(config, max(self.factor * config.backoff, config.minimum))
        if self.good_steps + 1 < config.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(config, min(2 * self.factor, config.maximum))

    @property
    def figures(self) -> dict[str, Any]:
        """The factor."""
        return {"next_loss_scale": self.factor}

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"factor": self.factor, "good_steps": self.good_steps}

    def restored(self, saved: Mapping[str, Any]) -> LossScale:
        """Undo ``to_dict``, under limits that may have changed since.

        Raises ValueError unless the factor is finite and above 0 and the count not negative.
        """
        config, factor, good_steps = self.config, float(saved["factor"]), int(saved["good_steps"])
        if not 0 < factor < math.inf or good_steps < 0:
            raise ValueError(
                f"loss_scale: the checkpoint has {dict(saved)}: a factor is finite and above 0, "
                "a count of steps not negative; resume from another checkpoint"
            )
        return LossScale(config, min(max(factor, config.minimum), config.maximum), good_steps)


def unscale_(slices: Slices, factor: float) -> None:
    """Divide gradients (fp32) by a power of two in place; what is not finite stays so."""
    if factor != 1 and slices:
        torch._foreach_mul_(list(slices.values()), 1 / factor)
