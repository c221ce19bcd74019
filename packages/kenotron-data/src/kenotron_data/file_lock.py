"""A lock between processes: the operating system's, so a killed process leaves none behind."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file while the block runs; it is removed at the end.

    Args:
        path: the lock file; its folder is made if need be.
        wait: wait for another holder; False refuses at once.

    Raises:
        ValueError: another process holds the lock and `wait` is False.
        OSError: the file system has no locks, the file cannot be written, or is a symbolic link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _acquire(path, wait)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(handle)


def _acquire(path: Path, wait: bool) -> int:
    """Open and lock the file that has this name when the lock is held, not one removed since."""
    if fcntl is None:
        raise OSError(
            f"{str(path)!r}: this system has no file locks (flock), which are needed here"
        )
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_named(handle, path):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise ValueError(
                f"{str(path)!r} is held by another process: wait until it has finished"
            ) from None
        except OSError as error:
            os.close(handle)
            raise OSError(
                f"{str(path)!r} cannot be locked ({error.strerror}): choose a folder on a file "
                "system with locks"
            ) from error
        os.close(handle)


def _is_named(handle: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(handle)
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)
