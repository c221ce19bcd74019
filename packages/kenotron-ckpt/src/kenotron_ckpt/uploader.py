"""Uploads in the background: checkpoints are handed over, sent in order, and reported on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron_ckpt.collective_errors import on_first
from kenotron_ckpt.folder import defect, steps_in
from kenotron_ckpt.generation import Generation, start_in
from kenotron_ckpt.lock import LOCK
from kenotron_ckpt.remote import PAUSE, TRIES, FsspecStore, RemoteMissing
from kenotron_ckpt.retention import remove_checkpoint
from kenotron_ckpt.store import LocalStore, Location, local_path, store_at
from kenotron_ckpt.upload_checkpoint import Sending
from kenotron_dist import Mesh

THREADS = 4
"""Files that are sent at a time; S3 takes up to 100 MiB of host memory for each."""
PATIENCE = 300.0
"""Seconds without any progress after which an upload is given up at the end of a run."""


@dataclass(frozen=True)
class UploadReport:
    """Result of an upload."""

    step: int
    seconds: float
    bytes: int
    """Length of the checkpoint's files."""
    sent_bytes: int
    """Length of those that were sent; the others were there."""
    error: str | None = None
    """Reason why there is no complete copy; None when there is one."""


@dataclass(frozen=True)
class _Job:
    folder: Path
    latest: bool

    @property
    def step(self) -> int:
        return int(self.folder.name)


class Uploader:
    """Copies checkpoints to ``<url>/<step>/`` while the program continues. For one rank."""

    def __init__(
        self,
        url: str,
        *,
        remove_after_upload: bool = False,
        read_back: bool | None = None,
        threads: int = THREADS,
        tries: int = TRIES,
        pause: float = PAUSE,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open ``url``; nothing is sent yet.

        Args:
            url: the remote run folder, of any kind that fsspec supports (``s3://bucket/run``).
            remove_after_upload: remove a local checkpoint after its copy was compared with it.
            read_back: compare by reading the copy's bytes, not only its manifest and the lengths
                of its files; None: when the local checkpoint is to be removed.
            threads: files that are sent at a time.
            tries: how often each call is made before the upload has failed.
            pause: seconds before the second try; each further pause is twice as long.
            options: for fsspec's file system (``endpoint_url``, ``key``, ...), next to those of
                the environment.

        Raises:
            ValueError: the URL is none, or needs a library that is not installed.
        """
        self._remote = FsspecStore(url, tries=tries, pause=pause, options=options)
        self._remove = remove_after_upload
        self._read_back = remove_after_upload if read_back is None else read_back
        self._threads = threads
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._job: _Job | None = None
        self._reports: list[UploadReport] = []
        self._thread: threading.Thread | None = None
        self._closed = self._stopped = False
        self._moved = time.monotonic()
        self._generation: Generation | None = None

    def check(self) -> None:
        """Ask the store for a listing. Raises RemoteError: a wrong URL, no credentials, ..."""
        with contextlib.suppress(RemoteMissing):
            self._remote.listing()

    def latest_start(self) -> int:
        """Return the number of the latest start that uploaded here; 0: none. Raises RemoteError."""
        return start_in(self._remote, LOCK)

    def begin(self, generation: Generation) -> None:
        """Upload as a start, which supersedes those before it: their uploads are refused.

        Raises RemoteError.
        """
        generation.take(self._remote)
        self._generation = generation

    def submit(self, step_folder: Location, *, latest: bool = True) -> None:
        """Have a checkpoint uploaded; returns at once. Those submitted before it come first.

        ``latest``: whether the remote ``latest.txt`` shall name it afterwards. Raises
        ValueError when the folder is no complete checkpoint, or after ``close``.
        """
        folder = local_path(store_at(step_folder))
        fault = defect(folder) if folder.name.isdecimal() else "its name is not a step"
        if fault:
            raise ValueError(f"{folder} is not uploaded: {fault}")
        with self._changed:
            if self._closed:
                raise ValueError(f"{folder} is not uploaded: the uploader was closed")
            waiting = [job for job in self._queue if job.folder != folder]
            self._queue = deque([*waiting, _Job(folder, latest)])
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def submit_all(self, folder: str | Path, up_to: int) -> None:
        """Have the complete checkpoints of a run folder uploaded, up to a step, newest first.

        For a resumed run: what an earlier process did not finish is finished. The remote
        ``latest.txt`` will name the newest of them.
        """
        latest = True
        for step in reversed(steps_in(Path(folder))):
            with contextlib.suppress(ValueError):  # no complete checkpoint
                if step <= up_to:
                    self.submit(Path(folder) / str(step), latest=latest)
                    latest = False

    def pending(self) -> list[int]:
        """Steps that are being uploaded or wait for it, in order."""
        with self._changed:
            return [job.step for job in ([self._job] if self._job else []) + list(self._queue)]

    def uploading(self, step: int) -> bool:
        """Return True where a step is being uploaded or waits for it: its folder must stay."""
        return step in self.pending()

    def finished(self) -> list[UploadReport]:
        """The uploads that ended since this was last asked, in order."""
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def close(self, patience: float = PATIENCE) -> list[UploadReport]:
        """Wait for the uploads, but no longer than ``patience`` seconds without any progress.

        Returns ``finished()``, with an error for each upload that did not end. What was sent of it
        stays, is no checkpoint, and is not sent again when the step is submitted again.
        """
        began = time.monotonic()
        with self._changed:
            self._closed = True
            while self._job or self._queue:
                left = max(began, self._moved) + patience - time.monotonic()
                if left <= 0 or self._thread is None:
                    break
                self._changed.wait(left)
            self._stopped = True
            for job in ([self._job] if self._job else []) + list(self._queue):
                error = (
                    f"the upload of step {job.step} was given up after {patience:g} s without "
                    f"progress; {job.folder} is untouched: submit it again"
                )
                self._reports.append(UploadReport(job.step, patience, 0, 0, error))
            self._queue.clear()
            self._changed.notify_all()
        return self.finished()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._stopped or not self._queue:
                    return
                self._job = self._queue.popleft()
            self._note()
            report = self._upload(self._job)
            with self._changed:
                if self._stopped:  # it was reported as given up
                    return
                self._job = None
                self._reports.append(report)
                self._changed.notify_all()

    def _upload(self, job: _Job) -> UploadReport:
        began, error = time.monotonic(), None
        sending = Sending(
            self._remote,
            job.folder,
            latest=job.latest,
            read_back=self._read_back,
            threads=self._threads,
            moved=self._note,
            stopped=lambda: self._stopped,
            generation=self._generation,
        )
        try:
            sending.run()
            if self._remove and not sending.changed():
                remove_checkpoint(LocalStore(job.folder))
        except Exception as failure:  # of any class: training continues
            known = isinstance(failure, OSError | ValueError)
            error = str(failure) if known else f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - began
        return UploadReport(job.step, seconds, sending.bytes, sum(sending.sent), error)

    def _note(self) -> None:
        """Something was sent or received."""
        self._moved = time.monotonic()


def start_uploader(url: str, mesh: Mesh, **arguments: Any) -> Uploader | None:
    """An ``Uploader`` on rank 0, None on the others. Collective over the mesh.

    Arguments as of ``Uploader``. The store is asked for a listing, so that a wrong URL or wrong
    credentials are found now: raises RemoteError or ValueError on every rank.
    """
    made: list[Uploader] = []

    def make() -> None:
        made.append(Uploader(url, **arguments))
        made[0].check()

    on_first(mesh, make)
    return made[0] if made else None
