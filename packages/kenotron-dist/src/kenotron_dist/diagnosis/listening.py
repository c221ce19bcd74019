"""Listeners that are given every communication of a rank before it starts, until closed."""

from __future__ import annotations

from typing import Self

from kenotron_dist.in_flight import CallsInFlight, Entry


class Listening:
    """Is called by ``pulse`` before each communication. A context manager."""

    def __init__(self, pulse: CallsInFlight) -> None:
        self._pulse = pulse
        pulse.listeners = (*pulse.listeners, self.heard)

    def heard(self, entry: Entry) -> None:
        """Act on a communication that is about to start; an error keeps it from starting."""

    def close(self) -> None:
        """Listen no longer."""
        self._pulse.listeners = tuple(x for x in self._pulse.listeners if x != self.heard)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
