"""Fencing: each start that writes to a run folder has a number, and older starts may not save.

Where locks do not work, or are lost, two programs may believe that a folder is theirs. The later
one has the higher number in the lock file, and the earlier one finds it there before it commits. A
remote run folder has a file of the same name, with the number of the latest start that uploads.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from kenotron_ckpt.folder import newest_save
from kenotron_ckpt.store import Location, Store

SUPERSEDED = "has been taken over by a later start of the run"
"""Part of the message of every save that is refused because a later start writes to the folder."""
_LINE = re.compile(rb"^generation (\d+) ([0-9a-f]{16})$", re.MULTILINE)


@dataclass(frozen=True)
class Generation:
    """A start that writes to a run folder."""

    path: Path
    """The lock file, which names the latest start."""
    number: int
    """From 1; each start has a higher number than those before it."""
    token: str
    """Tells two starts with one number apart: where locks do not work, both may have read one."""

    @property
    def line(self) -> str:
        """Line of the lock file."""
        return f"generation {self.number} {self.token}\n"

    def check(self) -> None:
        """Raise ValueError where a later start has taken the folder; OSError: it is not known.

        A folder that was removed has been taken by none.
        """
        text = b""
        with contextlib.suppress(FileNotFoundError):
            text = self.path.read_bytes()
        self._check(text, self.path.parent)

    def check_in(self, store: Store) -> None:
        """Raise ValueError where a later start writes to a remote run folder; OSError: see above.

        A store has no locks: what a later start writes between this and a commit is not seen.
        """
        self._check(_read(store, self.path.name), store)

    def take(self, store: Store) -> None:
        """Name this start as the latest in a remote run folder. Raises OSError."""
        store.write_text(self.path.name, self.line)

    def _check(self, text: bytes, place: object) -> None:
        number, token = _named(text) or (0, "")
        if number > self.number or (number == self.number and token != self.token):
            raise ValueError(
                f"{place} {SUPERSEDED} (generation {number}; this one is generation "
                f"{self.number}): nothing was saved, and this start must end; if it is the one to "
                "continue, stop the other one and start again"
            )


def next_generation(path: Path, handle: int, above: int = 0) -> Generation:
    """Return the generation of a start that has just locked a run folder.

    Args:
        path: the lock file.
        handle: the same, open. Where it names no start (a folder that was copied without it), the
            newest checkpoint does.
        above: number of a start of the run that used another folder.
    """
    text, number = os.pread(handle, 4096, 0), 0
    with contextlib.suppress(OSError):
        number = _latest_start(text, path.parent)
    return Generation(path, max(number, above) + 1, secrets.token_hex(8))


def start_in(store: Store, name: str) -> int:
    """Return the number of the latest start that wrote to a remote run folder; 0: none is known.

    ``name``: of its lock file. Raises RemoteError.
    """
    return _latest_start(_read(store, name), store)


def _latest_start(text: bytes, run: Location) -> int:
    """Return the number in a lock file; where it names no start, that of the newest checkpoint."""
    return (_named(text) or newest_save(run) or (0,))[0]


def _read(store: Store, name: str) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return store.read(name)
    return b""


def _named(text: bytes) -> tuple[int, str] | None:
    """Return number and token in the text of a lock file; None where it has none."""
    found = _LINE.search(text)
    return (int(found[1]), found[2].decode()) if found else None
