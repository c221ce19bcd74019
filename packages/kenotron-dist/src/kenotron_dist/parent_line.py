"""Messages between a local rank and the process that started it."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from kenotron_dist.exit_process import leave
from kenotron_dist.in_flight import CallsInFlight, Ticket

_LOOK_SECONDS = 0.5
_PATIENCE = 2.0
"""Seconds that a rank waits for one that has returned before this is an error."""

Counts = dict[str, int]
"""Communications that a rank has issued in all, by channel."""


class ParentLine:
    """A pipe to the parent. One outcome goes through it, the first that is sent.

    Args:
        pipe: the rank's end of it.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pulse: CallsInFlight | None = None
        """Communications that this rank waits for; None until it is connected."""
        self._pipe, self._lock, self._told = pipe, threading.Lock(), False
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, outcome: bytes) -> None:
        """Send the outcome, unless another was sent before."""
        with self._lock:
            if self._told:
                return
            self._told = True
        with contextlib.suppress(OSError):  # the parent may have closed the pipe
            self._pipe.send_bytes(outcome)

    def _listen(self) -> None:
        """Receive which ranks have returned; end this process when the parent closes the pipe."""
        returned: dict[int, Counts] = {}
        while True:
            try:
                if self._pipe.poll(_LOOK_SECONDS if returned else None):
                    rank, counts = pickle.loads(self._pipe.recv_bytes())
                    returned[rank] = counts
            except (EOFError, OSError):  # closed, or the parent is gone
                leave(0)
            if returned and self.pulse is not None:
                self._look(self.pulse, returned)

    def _look(self, pulse: CallsInFlight, returned: dict[int, Counts]) -> None:
        """Give up when this rank waits for one that has returned without joining."""
        now = time.monotonic()
        for wait in pulse.waits():
            missing = [
                rank for rank in wait.ticket.ranks if _is_missing(wait.ticket, rank, returned)
            ]
            if missing and now - wait.since > _PATIENCE:
                text = (
                    f"rank {missing[0]} has returned, and this rank waits for it in {wait.ticket}: "
                    "all ranks must make the same calls"
                )
                self.send(failure("PeerLost", text, _where_it_waits()))


def _is_missing(ticket: Ticket, rank: int, returned: dict[int, Counts]) -> bool:
    return rank in returned and returned[rank].get(ticket.channel, 0) < ticket.number


def _where_it_waits() -> str:
    """The stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(["Stack of the rank that waits:\n", *traceback.format_stack(frame)])


def success(result: Any, pulse: CallsInFlight) -> tuple[bool, Any, Counts]:
    """The message of a rank that has returned, not pickled yet."""
    counts = {channel: ticket.number for channel, ticket in dict(pulse.tickets).items()}
    return False, result, counts


def failure(kind: str, text: str, trace: str, bases: tuple[str, ...] = ()) -> bytes:
    """The message of a rank that has failed, pickled."""
    return pickle.dumps((True, (kind, text, trace, bases)))
