"""Failure of one rank in a step: the step ends on all of them, with the same first cause."""

from __future__ import annotations

from kenotron_dist import Axis
from kenotron_dist.diagnosis import Diverged, FailureBroadcast, PeerLost


class PipelineError(RuntimeError):
    """A step ended because a rank failed: says which stage, action and micro-batch, and why."""


class Alarm:
    """Turns an exception of this rank into the one that all ranks raise.

    Args:
        axis: the pp axis.
        closes: axes whose groups are closed, so that no rank waits for this one.
    """

    def __init__(self, axis: Axis, closes: list[Axis]) -> None:
        self._axis = axis
        self._distress = FailureBroadcast(closes)
        self.broken = ""
        """The first cause, once there was one."""

    def check(self) -> None:
        """Raise PipelineError when an earlier step has failed."""
        if self.broken:
            raise PipelineError(
                f"this pipeline ended in an earlier step: {self.broken}. Its groups are closed: "
                "connect a new mesh and make a new pipeline"
            )

    def confirm(self) -> None:
        """Raise RuntimeError when another rank has failed: numbers of this one mean nothing then.

        It can be known once this rank's device has been waited for, where devices wait.
        """
        if self._distress.cause_found:
            raise RuntimeError("another rank has failed")

    def raised(self, error: BaseException, where: str) -> BaseException:
        """Tell the others; what this rank must raise.

        A pipeline of one rank has no peer to inform: its exception is raised as it is, with a note.
        So are PeerLost, Diverged and what ends a process, after the others were informed.
        """
        if self._axis.size == 1 and not self.broken:
            error.add_note(f"in the pipeline, {where}")
            return error
        me = f"rank {self._axis.ranks[self._axis.rank]}, {where}"
        own = f"{me}: {type(error).__name__}: {error}"
        self.broken = self._distress.call(own)
        if isinstance(error, PeerLost | Diverged) or not isinstance(error, Exception):
            return error
        first = self.broken == own
        return PipelineError(own if first else f"{self.broken}; so this step ended on {me}")
