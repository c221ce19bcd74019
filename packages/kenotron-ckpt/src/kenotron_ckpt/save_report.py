"""Report of a save, and of the steps made meanwhile."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kenotron_ckpt.generation import SUPERSEDED
from kenotron_ckpt.store import Store, local_path

_USUAL = 50
"""So many of the latest steps without a save say how long a step takes."""


class SaveFailed(RuntimeError):
    """A checkpoint was not written; the message has the cause. Earlier ones are whole."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """Report of a save. Times in seconds."""

    step: int
    store: Store
    """The step folder."""
    failure: str = ""
    """Reason why there is no such checkpoint; empty when there is one."""
    nbytes: int = 0
    """Bytes of all ranks' files."""
    blocked: float
    """Time that the training stood still for it, on this rank."""
    waited: float = 0.0
    """The part of ``blocked`` in which an earlier save was not finished."""
    durable: float
    """From the call until the checkpoint stood."""
    slow_down: float | None = None
    """Mean time of the steps made meanwhile, over that of steps without a save; None: unknown."""
    removed: Sequence[int] = ()
    """Steps whose checkpoints were removed then (known on rank 0)."""
    follow_up: str = ""
    """Problem after the commit of the checkpoint (known on rank 0); empty when there was none."""

    @property
    def folder(self) -> Path:
        """The local step folder. Raises ValueError when it is in a remote store."""
        return local_path(self.store)

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9 bytes) a second from the call until the checkpoint stood."""
        return self.nbytes / max(self.durable, 1e-9) / 1e9

    def __str__(self) -> str:
        if self.failure:
            return f"step {self.step} was not saved: {self.failure}"
        slower = "" if self.slow_down is None else f", steps meanwhile x{self.slow_down:.2f}"
        return (
            f"{self.store}: {self.nbytes / 1e9:.3g} GB, blocked {self.blocked * 1e3:.0f} ms, "
            f"durable after {self.durable:.2f} s ({self.gb_per_s:.2f} GB/s){slower}"
        )


class SaveOutcomes:
    """Reports of the saves that have ended, and the failure that is still to be raised."""

    def __init__(self, on_failure: str) -> None:
        """``on_failure``: see ``Saver``. Raises ValueError for another word."""
        if on_failure not in ("warn", "report", "raise"):
            raise ValueError(f"on_failure: {on_failure!r} was given; it is warn, report or raise")
        self._on_failure, self._failure = on_failure, ""
        self._reports: list[SaveReport] = []

    def add(self, report: SaveReport) -> None:
        """Keep a report; warn of a failure, or keep it to be raised."""
        self._reports.append(report)
        if report.follow_up and self._on_failure == "warn":
            warnings.warn(f"{report.store} stands, but then: {report.follow_up}", stacklevel=5)
        if report.failure and (self._on_failure == "raise" or SUPERSEDED in report.failure):
            self._failure = str(report)
        elif report.failure and self._on_failure == "warn":
            warnings.warn(f"{report}; earlier checkpoints are whole", stacklevel=5)

    def take(self) -> list[SaveReport]:
        """Return the reports that were added since this was last called."""
        found, self._reports = self._reports, []
        return found

    def raise_failure(self) -> None:
        """Raise a failure that was kept: SaveFailed, or ValueError for a start that must end."""
        failure, self._failure = self._failure, ""
        if failure:
            raise (ValueError if SUPERSEDED in failure else SaveFailed)(failure)


class Pace:
    """Times of steps, with a save under way and without."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._meanwhile: list[float] = []
        self._last: float | None = None
        self._blocked = 0.0

    def begin(self, blocked: float) -> None:
        """A save begins; the call took ``blocked`` seconds of the step under way."""
        self._meanwhile = []
        self._blocked = blocked

    def step(self, saving: bool) -> None:
        """A step is over; ``saving``: a save was under way when it began."""
        now = time.perf_counter()
        if self._last is not None:
            steps = self._meanwhile if saving else self._usual
            steps.append(now - self._last - self._blocked)
        self._last, self._blocked = now, 0.0

    def slow_down(self) -> float | None:
        """Steps made meanwhile over usual ones; None when there are none of either."""
        if not self._meanwhile or not self._usual:
            return None
        return statistics.fmean(self._meanwhile) / statistics.median(self._usual)
