"""Measurements of ranks in a comparison, and what is found by comparing them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kenotron_engine import Piece


@dataclass(frozen=True)
class ComparedStep:
    """Measurements of one rank in a step."""

    loss: float
    norm: float
    """Of the whole gradient, before clipping."""
    gradient: list[Piece]
    weights: list[Piece]
    """After the update."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank."""

    initial: list[Piece]
    """Weights before the first step."""
    steps: list[ComparedStep]
    frozen: frozenset[str] = frozenset()
    """Weights without a gradient, by name."""


@dataclass(frozen=True)
class Departure:
    """A tensor that deviates by more than is allowed."""

    name: str
    deviation: float
    bound: float


@dataclass(frozen=True)
class Check:
    """One comparison; of tensors the worst is shown."""

    step: int
    """From 1; 0 before the first."""
    what: str
    deviation: float
    bound: float
    """0: to the bit."""
    worst: str = ""
    """The tensor whose deviation is largest in units of its bound."""
    departures: list[Departure] = field(default_factory=list)
    """Tensors above their bounds, in the order of the model."""

    @property
    def passed(self) -> bool:
        """True where nothing deviates by more than is allowed."""
        return self.deviation <= self.bound and not self.departures


@dataclass(frozen=True)
class Findings:
    """A layout against one process, and a model of transformers against itself in plain torch."""

    checks: list[Check] = field(default_factory=list)
    """Of the layout and one process."""
    broken: str = ""
    """Reason why the layout did not run; empty where it did."""
    plain: list[Check] = field(default_factory=list)
    """Of the layout and transformers' own model; empty for other models."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Losses of each step: of the layout, and of transformers' own model."""

    @property
    def passed(self) -> bool:
        """True where the layout runs and every check passed."""
        return not self.broken and all(check.passed for check in [*self.checks, *self.plain])
