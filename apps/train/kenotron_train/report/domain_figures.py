"""Figures of a proxy run of DoReMi: losses and weights of each domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kenotron_engine import DomainLosses, DomainWeights
from kenotron_train.report.numbers import or_null, short


def domain_metrics(weights: DomainWeights, losses: DomainLosses) -> dict[str, Any]:
    """What metrics.jsonl has of a step; a domain that its batch lacks has a loss of null.

    Args:
        weights: those after the step, by which the next one is weighed.
        losses: those of the step.
    """

    def by_name(values: tuple[float | None, ...]) -> dict[str, float | None]:
        pairs = zip(weights.names, values, strict=True)
        return {name: None if value is None else or_null(value) for name, value in pairs}

    return {
        "dro_loss": or_null(losses.dro_loss),
        "domain_losses": by_name(losses.losses),
        "domain_excess": by_name(losses.excess),
        "domain_samples": dict(zip(weights.names, losses.samples, strict=True)),
        "domain_weights": by_name(weights.weights),
        "domain_weights_average": by_name(weights.average),
    }


def domain_lines(weights: DomainWeights, losses: DomainLosses) -> list[str]:
    """Lines of the log about a step, as Nanotron has them."""
    found = domain_metrics(weights, losses)
    return [
        f"[DoReMi] {title}: {_listed(found[name])}"
        for title, name in (
            ("Domain weights", "domain_weights"),
            ("Domain losses", "domain_losses"),
            ("Samples per domain", "domain_samples"),
        )
    ]


def _listed(values: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{name} {'none' if value is None else short(value)}" for name, value in values.items()
    )
