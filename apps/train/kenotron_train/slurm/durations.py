"""Times as Slurm writes them."""

from __future__ import annotations

import re
from typing import Literal

_UNITS = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}


def seconds_of(text: str, bare: Literal["seconds", "minutes"]) -> float:
    """Seconds in ``1:30``, ``1:30:00``, ``2-12`` (days, hours), ``2-12:30`` or ``2-12:30:00``.

    ``bare`` is the unit of a number alone: minutes for Slurm; seconds, perhaps a fraction, for a
    flag that is given in seconds. Raises ValueError for other text.
    """
    if bare == "seconds" and re.fullmatch(r"\d*\.\d+", text):
        return float(text)
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise ValueError(
            f"{text} is no time: give {bare.upper()}, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, "
            "DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS"
        )
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    names = ["hours", "minutes", "seconds"]
    if not days and len(parts) < 3:
        names = [bare] if len(parts) == 1 else ["minutes", "seconds"]
    pairs = [("days", int(days or 0)), *zip(names, parts, strict=False)]
    return sum(_UNITS[name] * count for name, count in pairs)
