"""Formats of figures: short in lines, and as JSON has them."""

from __future__ import annotations

import math
from typing import Any


def short(value: float) -> str:
    """Three significant digits with K, M, G, T or P: 2.05K, 0.0123, 3e-05, 1e+30."""
    if abs(value) >= 1e18:
        return f"{value:.3g}"
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def or_null(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return value if math.isfinite(value) else None


def with_nulls(value: Any) -> Any:
    """Numbers in mappings of any depth, each as ``or_null`` has it."""
    if isinstance(value, dict):
        return {name: with_nulls(each) for name, each in value.items()}
    return or_null(value) if isinstance(value, float) else value
