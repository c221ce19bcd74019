"""One writer to a run folder."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import warnings
from pathlib import Path

from kenotron_ckpt.generation import next_generation
from kenotron_ckpt.store import LocalStore
from kenotron_command import OwnerFile, refused

LOCK = "writer.lock"
"""Name of the file that the program which writes to a folder of checkpoints has locked."""
OWNER = "writer.owner"
"""Name of the file that stands in for the lock on a file system without locks."""


class FolderLock:
    """Holds a run folder for this process until it is released, or the process ends however.

    The lock is the operating system's (``flock``): it cannot be left behind. Where locks do not
    work, a warning says so and an ``OwnerFile`` is used. No symbolic link is followed.

    Raises ValueError when another process holds the folder, OSError when it cannot be written, or
    the lock file is a symbolic link.
    """

    def __init__(self, folder: Path, above: int = 0) -> None:
        """Take a folder. ``above``: the generation is higher than this number, too."""
        LocalStore(folder).make()
        self._owner: OwnerFile | None = None
        self._handle: int | None = _opened(folder / LOCK)
        try:
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(self._handle, 200, 0).decode(errors="replace")
            holder = text.partition("\n")[0]
            self.release()
            raise ValueError(refused(folder, holder or "unknown")) from None
        except (OSError, ImportError) as error:
            self._own(folder, error)
        self.generation = next_generation(folder / LOCK, self._handle, above)
        """Of this holder: it is higher than those of all before it."""
        holder = f"process {os.getpid()} on {socket.gethostname()}\n{self.generation.line}"
        with contextlib.suppress(OSError):  # a full disk: the lock holds, it only has no name
            os.pwrite(self._handle, holder.encode(), 0)
            os.ftruncate(self._handle, len(holder.encode()))

    def _own(self, folder: Path, error: Exception) -> None:
        """Hold the folder by an owner file, since a lock failed with ``error``."""
        warnings.warn(
            f"{folder / LOCK}: locks do not work on this file system ({error}): {OWNER}, with a "
            "heartbeat, keeps other runs from the folder instead; a run that was killed may keep "
            "it for half a minute",
            stacklevel=4,
        )
        try:
            self._owner = OwnerFile(folder / OWNER)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others write. Harmless when done before."""
        if self._owner is not None:
            self._owner.release()
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with contextlib.suppress(OSError, ImportError):  # forked children have the handle, too
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(handle)


def _opened(path: Path) -> int:
    """Open a lock file, which is made if need be, but not through a symbolic link."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP, "it is a symbolic link, which is not followed: remove it", str(path)
        ) from None
