"""Weights of domains that are learned: DoReMi (Xie et al., arXiv 2305.10429), Algorithm 1.

All of it is a few fp64 numbers on the host, the same on every rank. k domains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kenotron_optim import Policy, StepOutcome


def domain_weights_update(
    weights: Sequence[float], excess: Sequence[float], *, step_size: float, smoothing: float
) -> tuple[float, ...]:
    """Return the next weights: an exponentiated gradient step, then smoothing.

    a'_i is proportional to weights_i * exp(step_size * excess_i); the result is
    (1 - smoothing) * a'_i / sum(a') + smoothing / k.

    Args:
        weights: (k,) the weights so far, 0 or more, of sum 1.
        excess: (k,) the excess loss of each domain, in nats a token.
        step_size: rate at which weights move.
        smoothing: share of even weights that is mixed in.
    """
    logs = [
        math.log(weight) + step_size * each if weight else -math.inf
        for weight, each in zip(weights, excess, strict=True)
    ]
    largest = max(logs)  # so that no exponential overflows
    raised = [math.exp(each - largest) for each in logs]
    total, even = math.fsum(raised), smoothing / len(raised)
    return tuple((1 - smoothing) * each / total + even for each in raised)


@dataclass(frozen=True, kw_only=True)
class DomainWeights(Policy):
    """The weights of a proxy run after some steps: state that its checkpoints hold."""

    name: ClassVar[str] = "domain_weights"
    names: tuple[str, ...]
    """The domains, in the order of the data's sources."""
    step_size: float
    """See ``domain_weights_update``."""
    smoothing: float
    """See ``domain_weights_update``."""
    weights: tuple[float, ...]
    """After the last step."""
    excess: tuple[float, ...]
    """Last excess loss of each domain; 0 until it was seen."""
    total: tuple[float, ...]
    """Sum of the weights over all steps."""
    steps: int = 0
    """Number of updates of the weights."""

    @classmethod
    def start(cls, names: Sequence[str], step_size: float, smoothing: float) -> DomainWeights:
        """Return the even weights with which a proxy run begins."""
        k = len(names)
        return cls(
            names=tuple(names),
            step_size=step_size,
            smoothing=smoothing,
            weights=(1 / k,) * k,
            excess=(0.0,) * k,
            total=(0.0,) * k,
        )

    @property
    def average(self) -> tuple[float, ...]:
        """Mean of the weights over all steps: the result of a proxy run."""
        if not self.steps:
            return self.weights
        return tuple(each / self.steps for each in self.total)

    def after(self, result: StepOutcome) -> DomainWeights:
        """Return the weights of the next step; one that was left out leaves them alone.

        So does one whose losses of domains, ``DomainObjective``'s, are not finite.
        """
        figures, excess = result.figures, result.figures.get("domain_excess")
        if excess is None or result.skipped:
            return self
        seen = [*figures["domain_losses"].values(), *excess.values()]
        if not all(math.isfinite(each) for each in seen if each is not None):
            return self
        return self.moved([excess[name] for name in self.names])

    def moved(self, excess: Sequence[float | None]) -> DomainWeights:
        """Return the weights after one more step.

        Args:
            excess: (k,) excess loss of each domain in the step's global batch; None for a domain
                that the batch lacks, whose last value then counts again.
        """
        seen = tuple(
            last if each is None else each for each, last in zip(excess, self.excess, strict=True)
        )
        weights = domain_weights_update(
            self.weights, seen, step_size=self.step_size, smoothing=self.smoothing
        )
        total = tuple(map(sum, zip(self.total, weights, strict=True)))
        return replace(self, weights=weights, excess=seen, total=total, steps=self.steps + 1)

    @property
    def figures(self) -> dict[str, Any]:
        """The weights of the next step, and their means so far, by domain."""
        return {
            "domain_weights": dict(zip(self.names, self.weights, strict=True)),
            "domain_weights_average": dict(zip(self.names, self.average, strict=True)),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values; floats lose no bit there."""
        return {
            "names": list(self.names),
            "weights": list(self.weights),
            "excess": list(self.excess),
            "total": list(self.total),
            "steps": self.steps,
        }

    def restored(self, saved: Mapping[str, Any]) -> DomainWeights:
        """Return the state that ``to_dict`` wrote, with the rates of this one.

        Raises:
            ValueError: it is of other domains.
        """
        names = tuple(map(str, saved["names"]))
        if names != self.names:
            raise ValueError(
                f"the domain weights are of {', '.join(names)}, but the domains are "
                f"{', '.join(self.names)}: give the former domains in the same order, or begin a "
                "new run"
            )
        weights, excess, total = (
            tuple(map(float, saved[key])) for key in ("weights", "excess", "total")
        )
        return replace(self, weights=weights, excess=excess, total=total, steps=int(saved["steps"]))
