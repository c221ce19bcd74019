"""A lock between processes: the operating system's, so a killed process leaves none behind."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from kenotron_command import OwnerFile, refused

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file while the block runs; it is removed at the end.

    Where locks do not work (``flock`` fails with ENOLCK, ENOSYS or EACCES, say), a warning says so
    and a file with a heartbeat is used, next to the lock file (``OwnerFile``).

    Args:
        path: the lock file; its folder is made if need be.
        wait: wait for another holder; False refuses at once.

    Raises:
        ValueError: another process holds the lock and `wait` is False.
        OSError: the file cannot be written, or is a symbolic link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, owner = _acquire(path, wait), None
    try:
        if handle is None:
            owner = OwnerFile(path.with_name(f"{path.name}.owner"), path, wait=wait)
        yield
    finally:
        if owner is not None:
            owner.release()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        if handle is not None:
            os.close(handle)


def _acquire(path: Path, wait: bool) -> int | None:
    """Open and lock the file that has this name when the lock is held, not one removed since.

    None where locks do not work.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            if fcntl is None:
                raise OSError("this system has no flock")
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_named(handle, path):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise ValueError(refused(path, "it holds the lock")) from None
        except OSError as error:
            os.close(handle)
            warnings.warn(
                f"{path}: locks do not work on this file system ({error}): {path.name}.owner, with "
                "a heartbeat, keeps other processes out instead; after one that was killed they "
                "wait half a minute",
                stacklevel=4,
            )
            return None
        os.close(handle)


def _is_named(handle: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(handle)
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)
