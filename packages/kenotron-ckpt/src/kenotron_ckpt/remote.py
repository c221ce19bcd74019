"""A folder of a remote store: whole files in, ranges of files out, every call retried.

The only file of the package that uses fsspec, which is imported when the first URL is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from kenotron_ckpt.protocol import SaveMoment, passed

T = TypeVar("T")

TRIES = 4
"""Attempts of a call before it has failed."""
PAUSE = 1.0
"""Seconds before the second try; each further pause is twice as long."""
RANGE_BYTES = 1 << 24
"""Bytes asked for at a time when a file is read."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {  # parts of 50 MiB, this many of a file in memory at a time
        "max_concurrency": 2,
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"mode": "standard", "total_max_attempts": 2},
        },
    },
    "file": {"auto_mkdir": True},
}
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_LASTING += (TypeError, ValueError, AttributeError)


class RemoteError(OSError):
    """The final error of a store, with the URL and what to do about it."""

    def __init__(self, text: str, *, damaged: bool = False, errno: int | None = None) -> None:
        super().__init__(text)
        self.errno = errno
        self.damaged = damaged
        """True where the store works, and its own checksum shows that the bytes have changed."""


class RemoteMissing(RemoteError, FileNotFoundError):
    """The store works, and there is nothing at the URL."""


def is_url(path: str | Path) -> bool:
    """Return True where ``path`` is a URL (``s3://bucket/run``) and no local path."""
    return isinstance(path, str) and bool(path.partition("://")[1])


class FsspecStore:
    """A folder at a URL that fsspec supports (``Store``), for several threads at once."""

    threads = 8
    """Requests at a time: each waits for the network."""

    def __init__(
        self,
        url: str,
        *,
        tries: int = TRIES,
        pause: float = PAUSE,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open ``url``; nothing is sent yet.

        Args:
            url: of any kind that fsspec supports.
            tries: attempts of each call.
            pause: seconds before the second try.
            options: of fsspec's file system, next to those of the environment.

        Raises:
            ValueError: it is no URL, or of a kind for which nothing is installed.
        """
        self.url = url.rstrip("/")
        self._tries, self._pause = tries, pause
        if not is_url(self.url) or not self.url.partition("://")[2]:
            raise ValueError(f"{url!r} was given; it must be a URL such as s3://bucket/run")
        self._store, root = _open(self.url, options or {})
        self._root = str(root).rstrip("/")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> FsspecStore:
        """The folder above this one."""
        found = copy(self)
        found.url, found._root = self.url.rpartition("/")[0], self._root.rpartition("/")[0]
        return found

    def at(self, path: str) -> FsspecStore:
        """The folder at a path below this one; the empty path is this one."""
        found = copy(self)
        found.url, found._root = self._url(path), self._full(path)
        return found

    def listing(self, path: str = "") -> dict[str, int | None]:
        """List the entries right below a folder: name to bytes, or None for a folder.

        Raises RemoteMissing when nothing is there, RemoteError.
        """
        here = self._full(path)
        entries = self._call(path, lambda: self._store.ls(here, detail=True))
        names = {entry["name"].rstrip("/"): entry for entry in entries}
        return {
            name.rpartition("/")[2]: None if entry["type"] == "directory" else int(entry["size"])
            for name, entry in names.items()
            if name != here
        }

    def read_text(self, path: str) -> str | None:
        """The text of a file in UTF-8, other bytes replaced; None: no file. Raises RemoteError."""
        with suppress(RemoteMissing):
            return self.read(path).decode(errors="replace")
        return None

    def read(self, path: str) -> bytes:
        """All bytes of a small file. Raises RemoteMissing, RemoteError."""
        return self._call(path, lambda: self._store.cat_file(self._full(path)))

    def write_text(self, path: str, text: str) -> None:
        """Give a file a text at one stroke: readers see the old text or the new, never a part."""
        full = self._full(path)
        if "file" not in _protocols(self._store):
            self._call(path, lambda: self._store.pipe_file(full, text.encode()))
        else:
            self._call(path, lambda: self._store.pipe_file(f"{full}.tmp", text.encode()))
            self._call(path, lambda: self._store.mv(f"{full}.tmp", full))
        passed(SaveMoment.TEXT_RENAMED)

    @contextmanager
    def create(self, path: str) -> Iterator[int]:
        """Write a file, in the folder for temporary files; it is sent when the block ends."""
        try:
            with NamedTemporaryFile(buffering=0) as file:
                yield file.fileno()
                self.send(path, Path(file.name))
        except RemoteError:
            raise
        except OSError as error:
            fix = "it is written to the folder for temporary files first: make room, or set TMPDIR"
            raise RemoteError(f"{self._url(path)}: {error}; {fix}", errno=error.errno) from error

    def send(self, path: str, file: Path, moved: Callable[[], None] = lambda: None) -> None:
        """Copy a local file; ``moved`` is called whenever some of it has arrived."""
        from fsspec.callbacks import Callback

        watch = Callback(hooks={"moved": lambda *_, **__: moved()})
        full = self._full(path)
        self._call(path, lambda: self._store.put_file(str(file), full, callback=watch))

    def open(self, path: str) -> AbstractContextManager[_RemoteFile]:
        """Read a file by ranges, in place; nothing is sent yet."""
        return nullcontext(_RemoteFile(self, path))

    def size(self, path: str) -> int:
        """Length of a file in bytes. Raises RemoteError."""
        return int(self._call(path, lambda: self._store.size(self._full(path))))

    def ranges(self, path: str, begin: int, end: int) -> Iterator[bytes]:
        """Bytes from ``begin`` to before ``end``, in order, some at a time; fewer if it ends."""
        full = self._full(path)
        while begin < end:
            stop = min(begin + RANGE_BYTES, end)
            data = self._call(path, _range_of(self._store, full, begin, stop))
            if not data:
                return
            yield data
            begin += len(data)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with suppress(RemoteMissing):
            self._call(path, lambda: self._store.rm_file(self._full(path)))

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder right below this one; an object store copies and removes it."""
        for name in self.listing(old) or [""]:
            start, end = (f"{self._full(path)}/{name}".rstrip("/") for path in (old, new))
            self._call(old, partial(self._store.mv, start, end))
        self.at(old).remove_folder()

    def make(self) -> None:
        """Do nothing: a folder is there once a file is in it."""

    def remove_folder(self) -> None:
        """Remove this folder, if nothing is in it and the store has folders."""
        with suppress(Exception):
            self._store.rmdir(self._root)

    def sync(self) -> None:
        """Do nothing: what a store has received stays."""

    def _url(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _call(self, path: str, run: Callable[[], T]) -> T:
        """Run a call, again after a pause where that may help. Raises RemoteError."""
        for left in reversed(range(self._tries)):
            try:
                return run()
            except Exception as error:
                if not left or _lasts(error):
                    raise _explained(self._url(path), error) from error
            time.sleep(self._pause * 2 ** (self._tries - 1 - left))
        raise ValueError(f"tries = {self._tries}: there must be at least 1")


class _RemoteFile:
    """A file of a remote store, read by ranges (``StoreFile``)."""

    chunk = RANGE_BYTES

    def __init__(self, store: FsspecStore, path: str) -> None:
        self._store, self._path = store, path

    def size(self) -> int:
        return self._store.size(self._path)

    def read(self, begin: int, nbytes: int) -> bytes:
        return b"".join(self._store.ranges(self._path, begin, begin + nbytes))

    def read_into(self, view: memoryview, begin: int) -> int:
        data = next(self._store.ranges(self._path, begin, begin + len(view)), b"")
        view[: len(data)] = data
        return len(data)


def _range_of(store: Any, path: str, begin: int, end: int) -> Callable[[], bytes]:
    return lambda: store.cat_file(path, start=begin, end=end)


def _open(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system and the path in it that a URL means."""
    scheme = url.partition("://")[0]
    # A file system of our own: a cached one would keep credentials that have changed since.
    own = {"use_listings_cache": False, "skip_instance_cache": True}
    given = {**_OPTIONS.get(scheme, {}), **own, **options}
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url, **given)
    except ImportError as error:
        raise ValueError(
            f"{url} needs a library that is not installed ({error}): pip install fsspec s3fs"
        ) from error
    except ValueError as error:
        raise ValueError(f"{url} cannot be opened: {error}") from error


def _protocols(store: Any) -> tuple[str, ...]:
    return (store.protocol,) if isinstance(store.protocol, str) else tuple(store.protocol)


def _lasts(error: Exception) -> bool:
    """Return True where the same call would fail again."""
    return isinstance(error, _LASTING) or "Credentials" in type(error).__name__


def _explained(url: str, error: Exception) -> RemoteError:
    """A store's error as a sentence with the URL and the fix."""
    text, name = str(error) or repr(error), type(error).__name__
    if isinstance(error, FileNotFoundError):
        if "bucket" not in text.lower():
            return RemoteMissing(f"{url}: nothing is there")
        return RemoteError(f"{url}: {text}; make the bucket, or correct the URL")
    if "Checksum" in name:
        return RemoteError(f"{url}: its bytes have changed ({text})", damaged=True)
    if isinstance(error, PermissionError):
        advice = "check the credentials, and that they may list, read, write and delete there"
    elif "Credentials" in name:
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    elif "Connect" in name or "Endpoint" in name:
        advice = "the store cannot be reached: check the network, and AWS_ENDPOINT_URL if it is set"
    else:
        advice = "see whether the store works, and try again"
    return RemoteError(f"{url}: {name}: {text}; {advice}")
