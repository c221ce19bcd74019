"""One writer where the file system has no locks: an owner file with a heartbeat.

The owner increments a number in its file. Another process that finds the file watches it: a number
that changes is an owner at work; one that does not for ``PATIENCE`` seconds is a leftover, which is
replaced. No two clocks are compared. No symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

TAKEN = "is being written by another run"
"""Part of the message of every process that is refused because another one writes there."""
BEAT = 3.0
"""Seconds between two beats of an owner."""
PATIENCE = 30.0
"""Seconds without a beat after which an owner counts as gone."""
SETTLE = 1.0
"""Seconds after which it is clear which of several processes has replaced a leftover."""


class OwnerFile:
    """Owns what an owner file stands for, until it is released or the process ends.

    Args:
        path: the owner file, in a folder that exists.
        owned: path that messages name; None: the file's folder.
        wait: wait for another owner to end; False refuses at its next beat.
        beat, patience, settle: see ``BEAT``, ``PATIENCE``, ``SETTLE``; in seconds.

    Raises:
        ValueError: another process owns it, and ``wait`` is False.
        OSError: the file cannot be written, or is a symbolic link.
    """

    def __init__(
        self,
        path: Path,
        owned: Path | None = None,
        *,
        wait: bool = False,
        beat: float = BEAT,
        patience: float = PATIENCE,
        settle: float = SETTLE,
    ) -> None:
        self._path, self._owned, self._beat = path, owned or path.parent, beat
        self._id, self._beats, self._process = uuid.uuid4().hex, 0, os.getpid()
        self._ended = threading.Event()
        while not self._created():
            found = _read(path)
            if found is None:  # removed in between
                continue
            if not _is_dead(found) and self._at_work(found, patience):
                if not wait:
                    raise ValueError(refused(self._owned, _named(found)))
                continue
            self._replace(found, settle)
            if (now := _read(path)) is not None and now.get("id") == self._id:
                break
        threading.Thread(target=self._work, name="owner-file", daemon=True).start()

    def release(self) -> None:
        """Let others own it. Harmless when done before, and in a forked child."""
        if self._ended.is_set() or self._process != os.getpid():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            if (_read(self._path) or {}).get("id") == self._id:
                self._path.unlink()

    def _text(self) -> bytes:
        """Content of the file; of one length, so that a beat needs no room on the disk."""
        own = {"id": self._id, "beats": f"{self._beats:012}", "process": self._process}
        return json.dumps(own | {"host": socket.gethostname(), "machine": _machine()}).encode()

    def _created(self) -> bool:
        """Create the file; return False where there was one already."""
        try:
            handle = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644
            )
        except FileExistsError:
            return False
        try:
            os.write(handle, self._text())
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(handle)
        return True

    def _at_work(self, found: dict[str, Any], patience: float) -> bool:
        """Return True once the owner beats; False after ``patience`` seconds, or without a file."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(min(0.5, patience / 10))
            now = _read(self._path)
            if now is None:
                return False
            if now != found:
                found.update(now)
                return True
        return False

    def _replace(self, found: dict[str, Any], settle: float) -> None:
        """Put an own file in the place of a leftover, unless that has changed."""
        fresh = self._path.with_name(f"{self._path.name}.{self._id}.tmp")
        fresh.write_bytes(self._text())
        if _read(self._path) == found:
            fresh.replace(self._path)
            time.sleep(settle)
        else:
            fresh.unlink()

    def _work(self) -> None:
        """Body of the thread that beats."""
        while not self._ended.wait(self._beat):
            try:
                if (_read(self._path) or {}).get("id") != self._id:
                    warnings.warn(
                        f"{self._path} was taken by another run, because this one was silent for "
                        "too long: two runs may write there; stop one of them",
                        stacklevel=1,
                    )
                    return
                self._beats += 1
                handle = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW)
            except OSError:  # a file system that is away: perhaps at the next beat
                continue
            with contextlib.suppress(OSError):
                os.pwrite(handle, self._text(), 0)
            with contextlib.suppress(OSError):
                os.close(handle)


def refused(path: Path, holder: str) -> str:
    """Return the message of a process that may not write, since ``holder`` does."""
    return (
        f"{path} {TAKEN} ({holder}): give each run a folder of its own, or wait until that one has "
        "ended, or stop it"
    )


def _named(found: dict[str, Any]) -> str:
    return f"process {found.get('process', '?')} on {found.get('host', '?')}"


def _read(path: Path) -> dict[str, Any] | None:
    """Contents of an owner file; empty when it is damaged, None when there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except ValueError:  # it is being written
        return {}
    finally:
        os.close(handle)
    return found if isinstance(found, dict) else {}


def _is_dead(found: dict[str, Any]) -> bool:
    """Return True where an owner on this very machine is known to have ended."""
    machine, process = _machine(), found.get("process")
    if not machine or found.get("machine") != machine or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _machine() -> str:
    """Identity of this boot of this machine and its process numbers; or empty."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
