"""A global batch that grows with the samples that were read.

The size is a function of samples and not of steps (as Megatron-LM's ``--rampup-batch-size``), so it
does not depend on how batches are cut or on where a run was stopped.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchRampConfig:
    """Growth of the global batch: from ``start`` in equal parts of ``samples``."""

    start: int
    """Samples of the first global batches."""
    increment: int
    """Samples that are added each time."""
    samples: int
    """Samples after which the global batch has its full size."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [
            f"{name}: {given} was given; it must be at least 1"
            for name, given in vars(self).items()
            if given < 1
        ]
        if found:
            raise ValueError("\n".join(found))

    def size(self, consumed: int, full: int) -> int:
        """Return the samples of the global batch that follows ``consumed`` samples.

        Args:
            consumed: samples read before, from 0.
            full: samples of the global batch after the ramp.
        """
        increments = -(-max(0, full - self.start) // self.increment)
        if consumed >= self.samples:
            return full
        return min(full, self.start + self.increment * (consumed * increments // self.samples))
