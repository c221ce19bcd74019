"""Parts of the time of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds on this rank."""

    step: float
    """From asking for the batch to the updated parameters, waiting included."""
    data_wait: float = 0.0
    """Part of it in which the batch was waited for."""
    save_blocked: float = 0.0
    """Training stood still for a checkpoint: in this step, and after it."""
    save_after: float = 0.0
    """Part of that after the step, so no part of ``step``."""
    communication: float | None = None
    """Part of the step in which this rank stood still for others; None where a device waits."""


class Stopwatch:
    """Measures one step after the other.

    ``waited`` returns the seconds that communication took so far, if they can be known.
    """

    def __init__(self, waited: Callable[[], float | None] = lambda: None) -> None:
        self._began = time.perf_counter()
        self._step = self._data = self._saving = self._within = 0.0
        self._waited = waited
        self._before: float | None = None
        self._communication: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()
        self._data = self._saving = 0.0
        self._before = self._waited()

    def stop(self) -> None:
        """It ends: validation and saving are no part of its time."""
        self._step, self._within = time.perf_counter() - self._began, self._saving
        before, after = self._before, self._waited()
        self._communication = None if before is None or after is None else after - before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The batch is waited for."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._data += time.perf_counter() - began

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint keeps the training waiting."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._saving += time.perf_counter() - began

    @property
    def times(self) -> StepTimes:
        """Times of the step that ended last."""
        after = self._saving - self._within
        return StepTimes(self._step, self._data, self._saving, after, self._communication)
