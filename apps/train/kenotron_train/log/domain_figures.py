"""Lines of the log about a proxy run of DoReMi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kenotron_command import short


def domain_lines(figures: Mapping[str, Any]) -> list[str]:
    """Lines about weights and losses of each domain, as Nanotron has them; none without domains.

    Args:
        figures: those of a step, and of what decides about the next.
    """
    return [
        f"[DoReMi] {title}: {_listed(figures[name])}"
        for title, name in (
            ("Domain weights", "domain_weights"),
            ("Domain losses", "domain_losses"),
            ("Samples per domain", "domain_samples"),
        )
        if name in figures
    ]


def _listed(values: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{name} {'none' if value is None else short(value)}" for name, value in values.items()
    )
