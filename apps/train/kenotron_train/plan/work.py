"""Seconds that a rank works, by what they are for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

Parts = defaultdict[str, float]
"""Seconds by what they are for."""


@dataclass
class WorkSeconds:
    """Seconds on a rank, by what they are for."""

    forward: Parts = field(default_factory=lambda: defaultdict(float))
    inputs: Parts = field(default_factory=lambda: defaultdict(float))
    """Of gradients of inputs, recomputation included."""
    weights: Parts = field(default_factory=lambda: defaultdict(float))

    def add(self, other: WorkSeconds, times: float = 1) -> None:
        """Add other work, so many times."""
        for mine, more in zip(self.parts, other.parts, strict=True):
            add_parts(mine, more, times)

    @property
    def parts(self) -> tuple[Parts, Parts, Parts]:
        """Forward, gradients of inputs, gradients of weights."""
        return self.forward, self.inputs, self.weights

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Sums of ``parts``."""
        forward, inputs, weights = (sum(each.values()) for each in self.parts)
        return forward, inputs, weights

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return sum(self.seconds)


def add_parts(to: Parts, more: Mapping[str, float], times: float = 1) -> None:
    """Add seconds to others, so many times."""
    for what, seconds in more.items():
        to[what] += seconds * times


def parts_of(**seconds: float) -> Parts:
    """Return seconds by what they are for."""
    return defaultdict(float, seconds)
