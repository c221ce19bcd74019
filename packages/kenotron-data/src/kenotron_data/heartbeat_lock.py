"""A lock where the file system has none: a file that its owner rewrites while it holds it.

A file that changes has an owner at work. One that does not change for ``PATIENCE`` seconds is left
over from a killed process and is replaced. No two clocks are compared, and no symbolic link is
followed.
"""

import contextlib
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

BEAT = 3.0
"""Seconds between two beats of an owner."""
PATIENCE = 30.0
"""Seconds without a beat after which an owner counts as gone."""
SETTLE = 1.0
"""Seconds after which it is clear which of several processes has replaced a leftover."""


@contextlib.contextmanager
def heartbeat_locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an owner file while the block runs; it is removed at the end.

    Args:
        path: the owner file, in a folder that exists.
        wait: wait for another holder; False refuses at its next beat.

    Raises:
        ValueError: another process holds the file and `wait` is False.
        OSError: the file cannot be written, or is a symbolic link.
    """
    own, ended = uuid.uuid4().hex, threading.Event()
    while not (_created(path, own) or _replaced(path, own)):
        if not wait and path.exists():
            raise ValueError(
                f"{str(path)!r} is held by another process: wait until it has finished"
            )
    beating = threading.Thread(target=_beat, args=(path, own, ended), daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()
        with contextlib.suppress(OSError):
            if _owns(own, _read(path)):
                path.unlink()


def _text(own: str, beats: int = 0) -> bytes:
    """Contents of an owner file; of one length, so that a beat needs no room on the disk."""
    return f"{own} {beats:012}\n".encode()


def _read(path: Path) -> bytes | None:
    """Contents of an owner file; None when there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return os.pread(handle, 4096, 0)
    finally:
        os.close(handle)


def _owns(own: str, found: bytes | None) -> bool:
    return found is not None and found.startswith(own.encode())


def _created(path: Path, own: str) -> bool:
    """Return whether there was no file, so that this process has made it."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(handle, _text(own))
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(handle)
    return True


def _replaced(path: Path, own: str) -> bool:
    """Return whether the file was a leftover, and this process the one that has replaced it."""
    left, end = _read(path), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(min(0.5, PATIENCE / 10))
        if (now := _read(path)) is None or now != left:
            return False
    fresh = path.with_name(f"{path.name}.{own}")
    fresh.write_bytes(_text(own))
    if _read(path) != left:
        fresh.unlink()
        return False
    fresh.replace(path)
    time.sleep(SETTLE)  # others that saw the same leftover replace it too: the last one has it
    return _owns(own, _read(path))


def _beat(path: Path, own: str, ended: threading.Event) -> None:
    """Body of the thread that rewrites the file."""
    beats = 0
    while not ended.wait(BEAT):
        try:
            if not _owns(own, _read(path)):
                warnings.warn(
                    f"{path} was taken by another process, because this one was silent for too "
                    "long: both may write the same files; stop one of them",
                    stacklevel=1,
                )
                return
            beats += 1
            handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError:  # a file system that is away: perhaps at the next beat
            continue
        with contextlib.suppress(OSError):
            os.pwrite(handle, _text(own, beats), 0)
        with contextlib.suppress(OSError):
            os.close(handle)
