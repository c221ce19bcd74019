"""Communication that one autograd function starts and another one awaits.

Forward, ``start`` is called before other work and ``wait`` after it. Backward the engine runs
functions in the reverse order, so the second function starts the communication of gradients and
the first one awaits it: what was between them is between them again.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kenotron_dist import Handle


class InFlight:
    """State between the two functions: one communication at a time, forward or backward."""

    def __init__(self) -> None:
        self._handle: Handle | None = None

    def start(self, handle: Handle) -> None:
        """Keep a communication that was started."""
        self._handle = handle

    def wait(self) -> Tensor:
        """Block until it is done; the result, (rows, D)."""
        handle, self._handle = self._handle, None
        assert handle is not None  # the other function has started it
        return handle.wait()


class Pending:
    """A result under way. Every rank waits for its results in the same order.

    Args:
        finish: waits for it, and returns it: (R, D) or (T, D).
    """

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until it has arrived; the result. Waiting twice is allowed."""
        if self._result is None:
            self._result = self._finish()
        return self._result
