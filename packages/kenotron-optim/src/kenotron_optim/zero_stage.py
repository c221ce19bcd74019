"""Stages of ZeRO: what data ranks share instead of holding it whole."""

from __future__ import annotations

from enum import IntEnum


class ZeroStage(IntEnum):
    """A stage of ZeRO (Rajbhandari et al., arXiv 1910.02054); code asks what it cuts.

    Raises ValueError for any other number, as every enum.
    """

    NOTHING = 0
    STATES = 1
    GRADIENTS = 2
    PARAMETERS = 3

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"ZeRO stage {value} is not available: choose 0, 1, 2 or 3")

    @property
    def cuts_states(self) -> bool:
        """True where a rank has masters and states of its own slices only."""
        return self >= ZeroStage.STATES

    @property
    def cuts_gradients(self) -> bool:
        """True where a rank may keep gradients of its own slices only."""
        return self >= ZeroStage.GRADIENTS

    @property
    def cuts_parameters(self) -> bool:
        """True where parameters are gathered where a layer needs them, and freed."""
        return self >= ZeroStage.PARAMETERS

    def owners(self, rank: int, size: int) -> range:
        """Return those of ``size`` data ranks whose slices the one of index ``rank`` updates."""
        return range(rank, rank + 1) if self.cuts_states else range(size)
