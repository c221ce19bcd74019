"""A rank that the others wait for, step after step: it is left out, or named."""

from __future__ import annotations

from collections.abc import Callable

from kenotron_train.log.rank_times import RankTimes
from kenotron_train.log.report import Report


class SlowRank(RuntimeError):
    """A rank was slow for too long; the others continue without it from a checkpoint."""


class SlowRanks:
    """Watches for a rank that is slow for ``parallelism.leave_out_slow`` steps in a row.

    Every rank has one, and all decide the same.
    """

    def __init__(
        self,
        steps: int | None,
        times: RankTimes,
        report: Report,
        needs: Callable[[int], str],
        leave: Callable[[int], None],
    ) -> None:
        """Take what decides.

        Args:
            steps: ``parallelism.leave_out_slow``.
            times: of all ranks.
            report: takes warnings.
            needs: returns why the run needs a rank; empty where it does not.
            leave: called before a rank is left out; both are called on all ranks.
        """
        self._steps, self._times, self._report = steps, times, report
        self._needs, self._leave = needs, leave
        self._named: set[int] = set()

    def check(self, save: Callable[[], None]) -> None:
        """Look at the last steps. Collective over the mesh where a rank is slow.

        Args:
            save: saves the run; called before a rank is left out.

        Raises:
            SlowRank: on all ranks; its message names the one that is slow.
        """
        found = None if self._steps is None else self._times.slow_for(self._steps)
        if found is None or found.rank in self._named:
            return
        said = f"{found}, in each of {self._steps} steps"
        if kept := self._needs(found.rank):
            self._named.add(found.rank)
            self._report.say(f"{said}; it is not left out: {kept}", "warning")
            return
        save()
        self._leave(found.rank)
        raise SlowRank(said)
