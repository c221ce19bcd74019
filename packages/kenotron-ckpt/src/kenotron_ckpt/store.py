"""Stores: a run folder, wherever it lies: files read by ranges, written whole, renamed, removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kenotron_ckpt.protocol import SaveMoment, passed
from kenotron_ckpt.remote import FsspecStore, is_url

LINK = "is a link to nothing"
"""Reason of the FileNotFoundError for a symbolic link without a target."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors that say that a path does not exist; others leave it open."""


class StoreFile(Protocol):
    """A file of a store that is open for reading. May be used by several threads at once."""

    @property
    def chunk(self) -> int:
        """Bytes to ask for at a time where they are hashed as they arrive."""
        ...

    def size(self) -> int:
        """Length of the file in bytes. Raises OSError."""
        ...

    def read(self, begin: int, nbytes: int) -> bytes:
        """Bytes from ``begin`` on, fewer where the file ends. Raises OSError."""
        ...

    def read_into(self, view: memoryview, begin: int) -> int:
        """Read bytes from ``begin`` on; returns how many, 0 at the end. Raises OSError."""
        ...


class Store(Protocol):
    """A folder of a local or remote file system; its text is the path or URL.

    May be used by several threads at once.
    """

    @property
    def name(self) -> str:
        """Last part of the path or URL."""
        ...

    @property
    def threads(self) -> int:
        """Files, or parts of one, that are read at a time."""
        ...

    @property
    def parent(self) -> Store:
        """The folder above this one."""
        ...

    def at(self, path: str) -> Store:
        """The folder at a path below this one; the empty path is this one."""
        ...

    def listing(self, path: str = "") -> dict[str, int | None]:
        """List the entries right below a folder: name to bytes, or None for a folder.

        Links without a target are left out. Raises FileNotFoundError when there is no such folder,
        NotADirectoryError when it is a local file, OSError.
        """
        ...

    def open(self, path: str) -> AbstractContextManager[StoreFile]:
        """Open a file for reading. Raises OSError, here or at the first read."""
        ...

    def size(self, path: str) -> int:
        """Length of a file in bytes. Raises FileNotFoundError, OSError."""
        ...

    def read(self, path: str) -> bytes:
        """All bytes of a small file. Raises FileNotFoundError, OSError."""
        ...

    def make(self) -> None:
        """Make the folder and those above it, where the store has folders. Raises OSError."""
        ...

    def create(self, path: str) -> AbstractContextManager[int]:
        """Write a file from its beginning to the descriptor that is given.

        When the block ends, the file is in the store, and stays there if the machine stops. Raises
        OSError.
        """
        ...

    def write_text(self, path: str, text: str) -> None:
        """Give a file a text at one stroke: readers see the old text or the new, never a part."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder right below this one. Raises OSError."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove_folder(self) -> None:
        """Remove this folder, if nothing is in it."""
        ...

    def sync(self) -> None:
        """Return when the names of the files in this folder are in the store for good."""
        ...


Location = str | Path | Store
"""A local path, a URL, or a store that was made of one of them, perhaps with options."""


class _LocalFile:
    """An open local file."""

    chunk = 1 << 20
    """These bytes stay in the processor's cache until they are hashed."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def size(self) -> int:
        return os.fstat(self._handle).st_size

    def read(self, begin: int, nbytes: int) -> bytes:
        return os.pread(self._handle, nbytes, begin)

    def read_into(self, view: memoryview, begin: int) -> int:
        return os.preadv(self._handle, [view], begin)


@dataclass(frozen=True)
class LocalStore:
    """A local folder, on a disk, in memory (tmpfs), or shared by nodes."""

    path: Path
    threads: int = 4
    """They wait for the disk, or copy from its cache without Python's lock."""

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def parent(self) -> LocalStore:
        """The folder above this one."""
        return LocalStore(self.path.parent, self.threads)

    def at(self, path: str) -> LocalStore:
        """The folder at a path below this one."""
        return LocalStore(self.path / path, self.threads)

    def listing(self, path: str = "") -> dict[str, int | None]:
        """Names to lengths, None for folders. See ``Store``."""
        found: dict[str, int | None] = {}
        for each in (self.path / path).iterdir():
            try:
                status = each.stat()
            except OSError as error:  # a link to nothing, or removed just now
                if error.errno not in ABSENT:
                    raise
            else:
                found[each.name] = None if stat.S_ISDIR(status.st_mode) else status.st_size
        return found

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[StoreFile]:
        """Open a file for reading. See ``Store``."""
        with (self.path / path).open("rb", buffering=0) as file:
            yield _LocalFile(file.fileno())

    def size(self, path: str) -> int:
        """Length of a file in bytes; the error for a link without a target says so (``LINK``)."""
        full = self.path / path
        try:
            return full.stat().st_size
        except FileNotFoundError:
            if full.is_symlink():
                raise FileNotFoundError(errno.ENOENT, LINK, str(full)) from None
            raise

    def read(self, path: str) -> bytes:
        """All bytes of a small file. See ``Store``."""
        return (self.path / path).read_bytes()

    def make(self) -> None:
        """Have the folder, and those above it, on the disk: each is an entry of the one above."""
        if not self.path.parent.exists():
            self.parent.make()
        self.path.mkdir(exist_ok=True)
        self.parent.sync()
        passed(SaveMoment.FOLDER_MADE)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[int]:
        """Write a file; it is on the disk when the block ends. See `Store`."""
        with (self.path / path).open("wb", buffering=0) as file:
            yield file.fileno()
            os.fsync(file.fileno())

    def write_text(self, path: str, text: str) -> None:
        """Give a file a text at one stroke; it is on the disk on return."""
        temporary = self.path / f"{path}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            passed(SaveMoment.TEXT_OPENED)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        passed(SaveMoment.TEXT_WRITTEN)
        temporary.replace(self.path / path)
        passed(SaveMoment.TEXT_RENAMED)
        self.sync()

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder right below this one."""
        (self.path / old).rename(self.path / new)
        self.sync()

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / path).unlink()
            passed(SaveMoment.LEFTOVER_REMOVED)

    def remove_folder(self) -> None:
        """Remove this folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def sync(self) -> None:
        """Put the folder's entries on the disk. On tmpfs this, and fsync, does nothing."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def store_at(place: Location) -> Store:
    """Return the store at a path or URL. Raises ValueError for a URL that cannot be opened."""
    if isinstance(place, Path):
        return LocalStore(place)
    if isinstance(place, str):
        return FsspecStore(place) if is_url(place) else LocalStore(Path(place))
    return place


def local_path(store: Store) -> Path:
    """Return the path of a local folder. Raises ValueError for a remote one."""
    if isinstance(store, LocalStore):
        return store.path
    raise ValueError(f"{store} is in a remote store; a local folder is needed: copy it first")
