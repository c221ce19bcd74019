"""The error of a program whose local ranks failed."""

from __future__ import annotations


class RankError(RuntimeError):
    """A local rank failed or died. The message is one sentence; a note has the rank's traceback."""

    def __init__(
        self,
        rank: int,
        kind: str,
        message: str,
        trace: str = "",
        bases: tuple[str, ...] = (),
        code: int = 1,
    ) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}")
        self.rank = rank
        self.kind = kind
        """Name of the exception's class, or ``killed`` / ``exited``."""
        self.reason = message
        """The exception's own text."""
        self.trace = trace
        """The rank's traceback; empty when it died without one."""
        self.code = code
        """Exit code for a program that gives up because of this."""
        self.signal = 0
        """Signal that asked for an end, and was passed on to the ranks before; 0: none."""
        self._bases = bases
        if trace:
            self.add_note(f"On rank {rank}: {trace}")

    def is_any(self, *kinds: type[BaseException]) -> bool:
        """Return whether the rank's exception was an instance of one of ``kinds`` or a subclass."""
        return any(kind.__name__ in self._bases for kind in kinds)
