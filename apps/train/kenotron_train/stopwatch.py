"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
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


class Stopwatch:
    """Measures one step after the other."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._step = self._data = self._saving = 0.0

    def start(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()
        self._data = self._saving = 0.0

    def stop(self) -> None:
        """It ends: validation and saving are no part of its time."""
        self._step = time.perf_counter() - self._began

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
        return StepTimes(self._step, self._data, self._saving)
