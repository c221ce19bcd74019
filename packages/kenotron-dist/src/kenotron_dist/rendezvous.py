"""Rendezvous of ranks: one that does not come, or stops on the way, is named within a limit.

Before there is a mesh there is no watchdog. Until all are connected a thread of each rank writes to
the store that it has come, and answers when another rank asks who is alive.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from kenotron_dist.exit_process import STALLED, leave
from kenotron_dist.ranks import listed
from kenotron_dist.signed_store import SignedStore, own_connection

_LONGEST_PAUSE = 1.0
"""Seconds between two looks at the store."""
_LEAST_PATIENCE = 2.0
"""A shorter silence, in seconds, may be a busy machine."""
SILENT = (
    "the store that they meet at does not answer: the process that hosts it is stopped or dead "
    "(rank 0, unless the launcher hosts it)"
)
_LOCKED = (
    "the file that they meet at stays locked: one of them was stopped while it wrote there; see "
    "which local process is stopped (state T)"
)
_SHOWN = 8
"""So many ranks are named one by one."""


def leave_late(text: str) -> None:
    """Write why ranks did not meet to stderr, and end this process with code ``STALLED``."""
    leave(STALLED, f"error: {text}")


class Meeting:
    """Around what connects all ranks: a context manager, used on every rank.

    Args:
        name: of this meeting, unique among those of the same ranks.
        store: shared by all ranks (a clone is used; a FileStore needs a file of its own).
        rank: this rank.
        size: number of ranks.
        limit: of all of it.
        on_late: called with the message that names who is missing, in a thread of its own: nothing
            interrupts a rank that waits to be connected.
        key: signs messages (``launch.signing_key``).
    """

    def __init__(
        self,
        name: str,
        store: dist.Store,
        rank: int,
        size: int,
        limit: timedelta,
        on_late: Callable[[str], None] = leave_late,
        key: bytes = b"",
    ) -> None:
        self._silence = _LOCKED if isinstance(store, dist.FileStore) else SILENT
        self._shared, self._prefix, self._key = store, f"kenotron-meeting/{name}", key
        self._rank, self._size, self._on_late = rank, size, on_late
        self._limit, self._began = limit.total_seconds(), time.monotonic()
        self._pause = min(self._limit / 4, _LONGEST_PAUSE)
        self._patience = max(3 * self._pause, _LEAST_PATIENCE)
        self._found = ""
        self._done, self._late, self._judge = (threading.Event() for _ in range(3))
        self._over, self._came = threading.Event(), threading.Event()  # over: done, or found
        self._threads = [
            threading.Thread(target=target, name="kenotron-meeting", daemon=True)
            for target in (self._talk, self._time)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._came.wait(self._patience)
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, RuntimeError) and self._late.is_set():
            self._over.wait(self._patience)  # one that gave up took the store with it
        found = self._found
        self._done.set()
        self._over.set()
        if isinstance(error, RuntimeError) and found:
            self._tell(found)
        self._threads[0].join(self._patience)  # others shall read that this one has joined

    def _talk(self) -> None:
        """All that is said to the store: one whose host is stopped blocks its callers."""
        answered = False
        try:
            self._store = SignedStore(own_connection(self._shared), self._prefix, self._key)
            me = f"process {os.getpid()} on {socket.gethostname()}"
            self._store.set(f"come/{self._rank}", me)
            self._came.set()
            while not self._done.wait(self._pause):
                if self._late.is_set():
                    self._store.set("asked", "1")
                if not answered and self._store.has("asked"):
                    self._store.set(f"alive/{self._rank}", "1")
                    answered = True
                if self._judge.is_set() and not self._found:
                    self._store.compare_set("verdict", "", self._look())
                verdict = self._store.find("verdict") if answered and not self._found else None
                if verdict is not None:
                    self._found = verdict.decode()
                    self._over.set()
            self._store.set(f"joined/{self._rank}", "1")
        except RuntimeError as error:  # every store's failure, its timeouts included
            said = str(error).partition("\n")[0]
            self._found = self._found or f"the store that they meet at is gone ({said})"
            self._over.set()

    def _time(self) -> None:
        """Ask once the limit is over, give all time to answer, then judge, and let all read it."""
        if not self._over.wait(self._limit):
            self._late.set()
        if self._late.is_set() and not self._over.wait(self._patience):
            self._judge.set()
        if self._judge.is_set() and not self._over.wait(self._patience):
            self._found = self._silence
        if not self._done.wait(3 * self._pause):
            self._tell(self._found)

    def _tell(self, found: str) -> None:
        seconds = time.monotonic() - self._began
        about = f"rank {self._rank} has waited {seconds:.1f} s for {self._size} ranks to meet"
        self._on_late(f"{about}: {found}")

    def _look(self) -> str:
        """Return the ranks that have not come, and those that came but do not answer."""
        come = self._said("come", range(self._size))
        missing = [rank for rank in range(self._size) if rank not in come]
        answering = {*self._said("alive", come), *self._said("joined", come), self._rank}
        silent = [rank for rank in come if rank not in answering]
        if not missing and not silent:
            return (
                "all have come and answer, but they do not get connected: see that the hosts reach "
                "one another on the interface that gloo or NCCL takes (GLOO_SOCKET_IFNAME, "
                "NCCL_SOCKET_IFNAME)"
            )
        parts = []
        if missing:
            have = "has" if len(missing) == 1 else "have"
            parts.append(
                f"{listed(missing)} {have} not come: see whether each was started, and what "
                "it does; a start that is slow needs a longer limit"
            )
        for rank in silent[:_SHOWN]:
            who = (self._store.find(f"come/{rank}") or b"an unknown process").decode()
            parts.append(
                f"rank {rank} ({who}) has come, but is stopped or dead: it does not answer"
            )
        if silent[_SHOWN:]:
            parts.append(f"and {len(silent) - _SHOWN} more do not answer")
        return "; ".join(parts)

    def _said(self, what: str, ranks: range | list[int]) -> list[int]:
        return [rank for rank in ranks if self._store.has(f"{what}/{rank}")]
