"""The arguments of dynamic loss scaling (no torch, no YAML here)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Choice of the factor of a float16 run's loss. Factors are powers of two.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    initial: float = 65536.0
    """Factor of the first step."""
    growth_interval: int = 2000
    """So many steps without overflow double the factor."""
    backoff: float = 0.5
    """Number that the factor is multiplied by when a gradient overflows."""
    minimum: float = 1.0
    """The smallest factor. What is not finite then is no overflow: `nonfinite` decides."""
    maximum: float = 16777216.0
    """The largest factor."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [
            f"{name}: {value} was given; it must be a power of two, as 65536 or 0.5"
            for name in ("initial", "backoff", "minimum", "maximum")
            if not _is_power_of_two(value := getattr(self, name))
        ]
        if not self.backoff < 1:
            found.append(f"backoff: {self.backoff} was given; it must be below 1")
        if self.growth_interval < 1:
            found.append(
                f"growth_interval: {self.growth_interval} was given; it must be at least 1"
            )
        if not self.minimum <= self.initial <= self.maximum:
            found.append(
                f"initial: {self.initial} was given; it must be from minimum ({self.minimum}) to "
                f"maximum ({self.maximum})"
            )
        if found:
            raise ValueError("\n".join(found))


def _is_power_of_two(value: float) -> bool:
    return 0 < value < math.inf and math.frexp(value)[0] == 0.5
