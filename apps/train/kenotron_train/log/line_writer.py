"""Lines appended to a file that may be unwritable for a while: a full disk ends no training."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

KEPT_BYTES = 16 << 20
"""Bytes of lines that wait for a file that cannot be written; older ones are dropped."""


class LineWriter:
    """Appends lines to a file; what cannot be written is kept, and tried again with the next line.

    Never raises OSError: metrics are no reason to end a training.

    Args:
        path: the file; it is made if need be.
        complain: called with a message when writing begins to fail, and when it works again.
        kept_bytes: see ``KEPT_BYTES``.
    """

    def __init__(
        self, path: Path, complain: Callable[[str], None], kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._path, self._complain, self._most = path, complain, kept_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._is_begun = False  # the first one that waits is the rest of a line
        self._lost = 0
        self._failing = False
        self._handle: int | None = None

    def write(self, line: str) -> None:
        """Append a line; if all is well it is with the operating system when this returns."""
        data = line.encode() + b"\n"
        self._waiting.append(data)
        self._bytes += len(data)
        self._try()
        while self._bytes > self._most and len(self._waiting) > 1 + self._is_begun:
            first = 1 if self._is_begun else 0
            self._bytes -= len(self._waiting[first])
            del self._waiting[first]
            self._lost += 1

    def close(self) -> None:
        """Try a last time, and close the file."""
        if self._waiting:
            self._try()
        if self._waiting:
            lines = len(self._waiting) + self._lost
            self._complain(f"{self._path} lacks the last {lines} lines: they could not be written")
        self._release()

    def _try(self) -> None:
        """Write all that waits."""
        try:
            self._write()
        except OSError as error:
            self._release()
            if not self._failing:
                self._failing = True
                self._complain(
                    f"{self._path} cannot be written ({error}): the training continues, and each "
                    "step tries again"
                )
            return
        if self._failing:
            lost = f", but {self._lost} lines are lost" if self._lost else ", nothing is lost"
            self._complain(f"{self._path} can be written again{lost}")
            self._failing, self._lost = False, 0

    def _write(self) -> None:
        if self._handle is None:  # also after a failure: a lost file system gives new handles only
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._handle = os.open(self._path, flags, 0o644)
        while self._waiting:
            data = self._waiting[0]
            done = os.write(self._handle, data)
            self._bytes -= done
            self._is_begun = done < len(data)
            if self._is_begun:
                self._waiting[0] = data[done:]
            else:
                self._waiting.popleft()

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                os.close(handle)
            except OSError as error:
                self._complain(f"{self._path}: {error}")
