"""Ranks and links that are slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from kenotron_train.preflight.measures import RankRates

UNITS = {"products": "TFLOP/s", "memory": "GB/s", "disk": "GB/s", "link": "GB/s"}
CAUSES = {
    "products": "look for other programs on it, for clocks that are held down by heat or power "
    "(nvidia-smi -q -d PERFORMANCE), and for fewer cores",
    "memory": "look for other programs on it and for memory that is missing a channel",
    "disk": "look at the file system of this host: another mount, a disk that is full or fails",
    "link": "look at both hosts' network: another interface, a cable, errors of the adapter",
}


def odd_ranks(rates: Sequence[RankRates], tolerance: float) -> list[str]:
    """Name each rate that the others exceed by more than ``tolerance``, and where to look.

    A rank is compared with the median of the others: one slow rank makes no other look slow.
    """
    found = []
    for name, unit in UNITS.items():
        values = {each.rank: value for each in rates if (value := getattr(each, name)) is not None}
        for each in rates:
            others = [value for rank, value in values.items() if rank != each.rank]
            own = values.get(each.rank)
            if own is not None and others and median(others) > tolerance * own:
                found.append(
                    f"{_place(rates, each, name)}: {name} at {own:.3g} {unit}, the others at "
                    f"{median(others):.3g}: {CAUSES[name]}"
                )
    return found


def _place(rates: Sequence[RankRates], each: RankRates, name: str) -> str:
    if name != "link":
        return f"rank {each.rank} on host {each.host}"
    before = rates[each.rank - 1]
    return f"from rank {before.rank} on host {before.host} to rank {each.rank} on {each.host}"
