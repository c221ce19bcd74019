"""Times of steps by rank: the slowest rank, its host, and what it spends the time on.

Each rank sends its times with its vote in the next step (``Stopper``): no further message.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kenotron_dist import Mesh, gather_objects
from kenotron_train.log.stopwatch import StepTimes

SHARE = 1 / 3
"""A rank is slow where the others wait for it during more than this share of a step: where a step
is computing alone, it takes 1.5 times as long as they do."""
PHASES = ("compute", "data")


@dataclass(frozen=True)
class SlowestRank:
    """The rank that the others wait for; seconds are means of a step."""

    rank: int
    host: str
    phase: str
    """``compute`` or ``data``: where it takes more time than the others."""
    own_s: float
    """Its computing and waiting for data, without waiting for other ranks."""
    others_s: float
    """Median of the same over the other ranks of its pipeline stage."""
    step_s: float

    @property
    def is_slow(self) -> bool:
        """True where the others wait for it too long (``SHARE``)."""
        return self.own_s - self.others_s > SHARE * self.step_s

    def to_metrics(self) -> dict[str, Any]:
        """Return what metrics.jsonl has of it."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on host {self.host}: {self.own_s:.3g} s of a step of "
            f"{self.step_s:.3g} s are its own ({self.phase}), {self.others_s:.3g} s those of others"
        )


def microseconds(times: StepTimes) -> tuple[int, int, int]:
    """Return what a rank sends of a step: its time, and its own parts of it (``PHASES``).

    Where a device waits for other ranks, how long it computed is not known: 0.
    """
    saving = times.save_blocked - times.save_after
    compute = 0.0
    if times.communication is not None:
        compute = max(times.step - times.communication - times.data_wait - saving, 0.0)
    return round(times.step * 1e6), round(compute * 1e6), round(times.data_wait * 1e6)


class RankTimes:
    """Times of all ranks since the last line of the log; the same on every rank.

    Collective over the mesh, to learn the hosts.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._hosts = gather_objects(socket.gethostname(), mesh.world)
        self._stage = mesh.world.size // mesh.config.pp
        self._sums: list[list[float]] = []
        self._count = 0
        self._slow: tuple[SlowestRank | None, int] = None, 0

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add a step: what ``microseconds`` returned, by rank. That of no step is left out."""
        if len(rows) < 2 or not rows[0][0]:
            return
        seconds = [[part / 1e6 for part in row] for row in rows]
        sums = self._sums or [[0.0] * len(row) for row in rows]
        both = zip(sums, seconds, strict=True)
        self._sums = [[a + b for a, b in zip(*each, strict=True)] for each in both]
        self._count += 1
        found, (known, count) = self._slowest(seconds), self._slow
        if found is None or not found.is_slow:
            self._slow = None, 0
        else:
            self._slow = found, count + 1 if known and known.rank == found.rank else 1

    def take(self) -> SlowestRank | None:
        """Return the slowest rank since this was last called; None: one rank, or no step."""
        means = [[each / self._count for each in row] for row in self._sums]
        self._sums, self._count = [], 0
        return self._slowest(means) if means else None

    def slow_for(self, steps: int) -> SlowestRank | None:
        """Return the rank that was slow in each of the last ``steps`` steps, if one was."""
        found, count = self._slow
        return found if count >= steps else None

    def _slowest(self, rows: Sequence[Sequence[float]]) -> SlowestRank | None:
        """Return the rank that is farthest behind the others of its stage; None: it has none."""
        step, found = max(row[0] for row in rows), list[SlowestRank]()
        own = [sum(row[1:]) for row in rows]
        for first in range(0, len(rows), self._stage):
            stage = range(first, first + self._stage)
            rank = max(stage, key=lambda each: own[each])
            others = [each for each in stage if each != rank]
            if not others:
                continue
            behind = [
                rows[rank][part] - median(rows[each][part] for each in others)
                for part in range(1, len(rows[rank]))
            ]
            phase, usual = PHASES[behind.index(max(behind))], median(own[each] for each in others)
            found.append(SlowestRank(rank, self._hosts[rank], phase, own[rank], usual, step))
        return max(found, key=lambda each: each.own_s - each.others_s, default=None)
