"""Ends of a run before its last step, and requests for a checkpoint: signals, a time limit.

Each rank votes at every step, in an all-gather over the mesh; all ranks get the same votes.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence

import torch

from kenotron_dist import Mesh, Signals, all_gather, to_device
from kenotron_engine import DeviceRead

STOPPED = 85
"""Exit status of a run that saved and ended before its last step: the same command resumes it."""
_TIME = 255
"""Stands for the time limit where others are numbers of signals."""
_FIRST_SAVE = 2.0
"""Seconds that a save is thought to take before there was one, with ``_SPEED``."""
_SPEED = 1e8
"""Bytes a second and rank that reach the disk, until it is known."""
_READ_SPEED = 5e8
"""Bytes a second at which all processes together read a checkpoint back, if the disk is slow."""
_MARGIN = 1.5
"""Saves and steps may take so many times the longest ones."""


class Stopper:
    """Decision whether the run ends after this step.

    Args:
        signals: of this rank.
        deadline: of ``time.monotonic``, which all processes of a host share and that is never set;
            inf: never.
        nbytes: that this rank writes in a save.
        ranks: number of those that do.
    """

    def __init__(self, signals: Signals, deadline: float, nbytes: int, ranks: int = 1) -> None:
        self._signals, self._deadline = signals, deadline
        self._save = _FIRST_SAVE + nbytes / _SPEED
        self._read = nbytes * ranks / _READ_SPEED
        self._step, self._known = 0.0, False
        self._began = time.monotonic()
        self._votes: DeviceRead | None = None
        self._ranks = ranks
        self.reason = ""
        """Reason why the run ends after this step; empty while it does not."""
        self.save = False
        """True where a checkpoint was asked for."""

    def vote(self, mesh: Mesh, more: Sequence[int] = ()) -> None:
        """Send this rank's vote in this step to all ranks. Collective over the mesh.

        Votes travel to the host behind the work of the step, so this process does not wait for its
        device. ``more``: numbers that travel with it, as many on each rank.
        """
        own = to_device(torch.tensor([self.own_vote(), *more]), mesh.device)
        self._votes = DeviceRead([all_gather(own, mesh.world)])  # (W * n,)

    def count_votes(self) -> list[list[float]]:
        """Decide by the votes of all ranks, at the end of a step; ``more`` of each rank."""
        if self._votes is None:
            return []
        (found,), self._votes = self._votes.wait(), None
        size = len(found) // self._ranks
        rows = [found[i : i + size] for i in range(0, len(found), size)]
        self.decide([row[0] for row in rows])
        return [row[1:] for row in rows]

    def own_vote(self) -> int:
        """Return this rank's vote: twice the signal that stops the run, plus 1 for a save."""
        stop = self._signals.stop
        if not stop and self._is_late():
            stop = _TIME
        return 2 * stop + self._signals.take_save()

    def decide(self, votes: Sequence[float]) -> None:
        """Set ``reason`` and ``save`` from the votes of all ranks, in the order of the ranks."""
        now = time.monotonic()
        self._step, self._began = max(self._step, now - self._began), now
        self.save = any(int(vote) % 2 for vote in votes)
        stops = [int(vote) // 2 for vote in votes]
        first = next((rank for rank, stop in enumerate(stops) if stop), None)
        if first is None:
            return
        if stops[first] == _TIME:
            self.reason = "the time limit is near"
        else:
            self.reason = f"rank {first} received {signal.Signals(stops[first]).name}"

    def saved(self, seconds: float) -> None:
        """Record how long a save took until it was on the disk."""
        self._save = max(self._save, seconds) if self._known else seconds
        self._known = True

    def _is_late(self) -> bool:
        """Return whether one more step might leave too little time to end the run.

        A save that is under way is waited for, one more is made, and it is read back.
        """
        if math.isinf(self._deadline):
            return False
        end = self._step + 2 * self._save + self._read
        return time.monotonic() + _MARGIN * end > self._deadline
