"""One checkpoint to a remote folder, by steps that may end at any moment and be taken up again.

The remote step folder is written in this order: ``uploading.txt``, which names the manifest of the
files that follow; the shards; what every ``commit`` writes. A remote file of the right length is
not sent again if ``uploading.txt`` names the same manifest, or if the remote manifest has the same
checksum for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from kenotron_ckpt.checksums import file_faults, pieces_by_file
from kenotron_ckpt.committing import INTENT, commit, files_in
from kenotron_ckpt.folder import MANIFEST, defect
from kenotron_ckpt.generation import Generation
from kenotron_ckpt.index import FileEntry, Manifest, Piece, seal_of
from kenotron_ckpt.remote import FsspecStore, RemoteError
from kenotron_ckpt.store import LocalStore
from kenotron_ckpt.threads import in_parallel
from kenotron_ckpt.verify_stream import Received

_TRIES = 3


class Stopped(Exception):
    """The upload was cancelled."""


class _Again(Exception):
    """The upload must start again from its beginning."""


class Sending:
    """The upload of one checkpoint."""

    def __init__(
        self,
        remote: FsspecStore,
        step_folder: Path,
        *,
        latest: bool,
        read_back: bool,
        threads: int,
        moved: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
        generation: Generation | None = None,
    ) -> None:
        """Prepare the upload; nothing is sent yet.

        Args:
            remote: the remote run folder.
            step_folder: the local step folder.
            latest: let ``latest.txt`` name it.
            read_back: compare remote bytes.
            threads: files that are sent at a time.
            moved: called whenever something has arrived.
            stopped: called before each file; True ends the upload.
            generation: start that uploads; one that was superseded changes nothing and commits
                nothing.
        """
        self._remote, self._folder = remote.at(step_folder.name), step_folder
        self._latest, self._read_back, self._threads = latest, read_back, threads
        self._moved, self._stopped = moved, stopped
        self._run, self._generation = remote, generation
        self._text = ""
        self.bytes = 0
        """Length of the checkpoint's files, set by ``run``."""
        self.sent: list[int] = []
        """Lengths of the files that were sent."""

    def run(self) -> None:
        """Send what is missing, commit, and compare.

        On return the remote checkpoint is complete, its manifest is the local one, and all files
        have their lengths (and checksums, with ``read_back``). Raises RemoteError, OSError,
        ValueError when the local checkpoint is damaged or a later start uploads, Stopped.
        """
        for left in reversed(range(_TRIES)):
            try:
                self._text = self._local_text()
                self._send(Manifest.from_json(self._text))
                return
            except _Again as reason:
                if not left:
                    raise OSError(f"{self._remote}: {reason}") from None
            except (OSError, ValueError) as error:
                if not left or not self.changed():
                    raise
                del error  # it was saved once more: what was to be sent is gone

    def changed(self) -> bool:
        """Return True where the local checkpoint is no longer the one that was sent."""
        with contextlib.suppress(OSError):
            return self._local_text() != self._text
        return False

    def _send(self, manifest: Manifest) -> None:
        self._check_start()
        there = files_in(self._remote)
        standing = self._remote.read_text(MANIFEST) if MANIFEST in there else None
        due = {name: entry.bytes for name, entry in manifest.files.items()}
        self.bytes = sum(due.values())
        if standing != self._text:
            there = self._begin(manifest, there, standing)
        missing = [name for name, size in due.items() if there.get(name) != size]
        missing.sort(key=lambda name: -due[name])
        pieces = pieces_by_file(manifest)

        def send(name: str) -> None:
            self._go_on()
            self._check(name, manifest.files[name], pieces[name])
            self._remote.send(name, self._folder / name, self._moved)
            self.sent.append(due[name])

        in_parallel(send, missing, self._threads)
        if self._read_back:
            self._compare_bytes(manifest, pieces)
        if self.changed():
            raise _Again("the checkpoint was saved once more while it was uploaded")
        self._commit(manifest)

    def _begin(
        self, manifest: Manifest, there: Mapping[str, int | None], standing: str | None
    ) -> dict[str, int | None]:
        """Make room; returns the remote files that are known to be what shall be sent.

        The checkpoint that stands there remains one unless a file of its own must be replaced.
        """
        seal = seal_of(self._text)
        if INTENT in there and self._remote.read_text(INTENT) == seal:
            return dict(there)
        old = _readable(standing)
        known = _contents(old) if old else {}
        same = {
            name: there.get(name)
            for name, content in _contents(manifest).items()
            if known.get(name) == content
        }
        in_the_way = [name for name in manifest.files if name in there and name not in same]
        if standing is not None and (not old or not set(old.files).isdisjoint(in_the_way)):
            self._remote.remove(MANIFEST)
        for name in in_the_way:
            self._remote.remove(name)
        self._remote.write_text(INTENT, seal)
        return same

    def _check(self, name: str, entry: FileEntry, pieces: list[Piece]) -> None:
        faults = file_faults(LocalStore(self._folder), name, entry, pieces)
        if faults:
            raise ValueError(
                f"{self._folder} is damaged and was not uploaded: {'; '.join(faults[:3])}"
            )

    def _compare_bytes(self, manifest: Manifest, pieces: Mapping[str, list[Piece]]) -> None:
        """Read every remote file; one that is not what was written is removed."""
        found: list[str] = []

        def read(name: str) -> None:
            entry = manifest.files[name]
            received = Received(name, entry, pieces[name])
            try:
                for data in self._remote.ranges(name, 0, entry.bytes):
                    self._go_on()
                    received.feed(data)
                faults = received.faults()
            except RemoteError as error:
                if not error.damaged:
                    raise
                faults = [str(error)]
            if faults:
                found.extend(faults)
                self._remote.remove(MANIFEST)
                self._remote.remove(name)

        in_parallel(read, manifest.files, self._threads)
        if found:
            raise _Again(f"what arrived is not what was sent: {'; '.join(sorted(found)[:3])}")

    def _commit(self, manifest: Manifest) -> None:
        """Commit, and look whether a reader would find every file of its length."""
        self._check_start()
        try:
            commit(self._remote, manifest, latest=self._latest, text=self._text)
            fault = defect(self._remote)
        except ValueError as error:
            fault = str(error)
        if fault:
            self._remote.remove(MANIFEST)
            raise _Again(f"what arrived is not whole: {fault}")

    def _check_start(self) -> None:
        if self._generation is not None:
            self._generation.check_in(self._run)

    def _go_on(self) -> None:
        self._moved()
        if self._stopped():
            raise Stopped

    def _local_text(self) -> str:
        return (self._folder / MANIFEST).read_text(encoding="utf-8")


def _readable(text: str | None) -> Manifest | None:
    with contextlib.suppress(ValueError):
        return None if text is None else Manifest.from_json(text)
    return None


def _contents(manifest: Manifest) -> dict[str, tuple]:
    """Sizes and checksums of files from a manifest: equal where the bytes are."""
    pieces = pieces_by_file(manifest)
    return {
        name: (entry, tuple((p.offset, p.bytes, p.checksum) for p in pieces[name]))
        for name, entry in manifest.files.items()
    }
