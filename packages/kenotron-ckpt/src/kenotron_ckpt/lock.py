"""One writer to a run folder."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from kenotron_ckpt.folder import make

LOCK = "writer.lock"


class FolderLock:
    """Holds a run folder for this process until it is released, or the process ends however.

    The lock is the operating system's (``flock``): it cannot be left behind. On a file system
    without locks nothing is held.

    Raises ValueError when another process holds the folder, OSError when it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        make(folder)
        self._handle: int | None = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._handle, 200, 0).decode(errors="replace").strip()
            self.release()
            raise ValueError(
                f"{folder} is being written by another run ({holder or 'unknown'}): give each run "
                "a folder of its own, or stop that one"
            ) from None
        except (OSError, ImportError):  # no locks here
            return
        holder = f"process {os.getpid()} on {socket.gethostname()}\n"
        with contextlib.suppress(OSError):  # a full disk: the lock holds, it only has no name
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, holder.encode(), 0)

    def release(self) -> None:
        """Let others write. Harmless when done before."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with contextlib.suppress(OSError, ImportError):  # forked children have the handle, too
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(handle)
