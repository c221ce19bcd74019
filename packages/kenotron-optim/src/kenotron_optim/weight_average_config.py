"""The arguments of an average of the weights (no torch, no YAML here)."""

from dataclasses import dataclass

from kenotron_optim.config_fields import raise_all


@dataclass(frozen=True, kw_only=True)
class WeightAverageConfig:
    """Exponential moving average of the weights.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    decay: float = 0.999
    """Share of the average that each update keeps; 1 / (1 - decay) updates count most."""
    every: int = 1
    """Updates from one to the next that the average takes in."""

    validate: bool = True
    """True: validation gives the loss of the averaged weights, too."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not 0 < self.decay < 1:
            found.append(f"decay: {self.decay} was given; it must be above 0 and below 1, as 0.999")
        if self.every < 1:
            found.append(f"every: {self.every} was given; it must be at least 1")
        raise_all(found)
