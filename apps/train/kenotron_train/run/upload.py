"""Copies of checkpoints in a remote store: made during training, and resumed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kenotron_ckpt import (
    SUPERSEDED,
    CheckpointsConfig,
    Generation,
    Manifest,
    S3UploadConfig,
    Store,
    UploadReport,
    complete_manifest,
    is_url,
    newest_save,
    on_first,
    on_first_at_length,
    start_uploader,
    steps_in,
)
from kenotron_command import short
from kenotron_dist import Mesh
from kenotron_train.log.report import Report


class Uploads:
    """The uploads that ``s3_upload`` asks for; without it, and but for rank 0, they do nothing.

    Made on all ranks, as a context manager: left by an error it waits for no upload.
    """

    def __init__(
        self,
        section: S3UploadConfig | None,
        checkpoints: CheckpointsConfig,
        mesh: Mesh,
        report: Report,
    ) -> None:
        """Ask the store for a listing, so that a bad URL or bad credentials end the run here.

        Collective over the mesh. Raises OSError or ValueError, on all ranks.
        """
        self._section, self._checkpoints = section, checkpoints
        self._mesh, self._report, self._uploader = mesh, report, None
        if section and section.upload_s3_path:
            self._uploader = start_uploader(
                section.upload_s3_path,
                mesh,
                remove_after_upload=section.remove_after_upload,
                read_back=section.read_back,
            )
        uploader = self._uploader
        self.latest_start = on_first(mesh, lambda: uploader.latest_start() if uploader else 0)
        """Number of the latest start that uploaded to the same place; 0: none."""

    def begin(self, generation: Generation | None) -> None:
        """Upload as this start of the run (on rank 0): earlier ones upload nothing any more.

        Collective over the mesh. Raises OSError, on all ranks.
        """
        uploader = self._uploader
        on_first(self._mesh, lambda: uploader and generation and uploader.begin(generation))

    def resumed(self, step: int) -> None:
        """Take up what an earlier process of this run left, up to the step that was resumed."""
        if self._uploader is not None and _goes_on(self._checkpoints, self._section):
            self._uploader.submit_all(self._checkpoints.checkpoints_path, step)

    def submit(self, folder: Store) -> None:
        """Have a checkpoint uploaded. From any thread. Raises ValueError when it is none."""
        if self._uploader is not None:
            self._uploader.submit(folder)

    def holds(self, folder: Store) -> bool:
        """Return True where a checkpoint must stay: it is sent or waits. From any thread."""
        return self._uploader is not None and self._uploader.uploading(int(folder.name))

    def say(self) -> None:
        """A line for each upload that has ended.

        Raises ValueError on rank 0 where a later start of the run uploads.
        """
        self._say_all(self._uploader.finished() if self._uploader is not None else ())

    def finish(self) -> None:
        """Wait for the uploads, as long as any of them runs, and report how they ended.

        Collective over the mesh. Raises ValueError where a later start of the run uploads.
        """
        if (section := self._section) is None or not section.upload_s3_path:
            return
        uploader = self._uploader

        def close() -> list[dict]:
            return [asdict(done) for done in uploader.close()] if uploader is not None else []

        found = on_first_at_length(self._mesh, "uploading checkpoints", close)
        self._say_all([UploadReport(**done) for done in found])

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        for done in self._uploader.close(patience=0) if self._uploader is not None else ():
            self._say(done)

    def _say_all(self, reports: Sequence[UploadReport]) -> None:
        for done in reports:
            self._say(done)
        if late := [done.error for done in reports if done.error and SUPERSEDED in done.error]:
            raise ValueError(late[0])

    def _say(self, done: UploadReport) -> None:
        url = f"{upload_url(self._section)}/{done.step}"
        if done.error is None:
            size = f"{short(done.sent_bytes)} of {short(done.bytes)} bytes sent"
            if self._section is not None and self._section.read_back:
                size += ", read back"
            self._report.say(f"Uploaded checkpoint {url} in {done.seconds:.1f} s, {size}")
            return
        folder = self._checkpoints.checkpoints_path
        self._report.say(
            f"checkpoint {done.step} has no complete copy in {url}: {done.error}; it is still in "
            f"{folder}: resume with checkpoints.resume_checkpoint_path: {folder} to send the rest",
            "error",
        )


def place_to_resume(
    checkpoints: CheckpointsConfig, section: S3UploadConfig | None, mesh: Mesh
) -> str | None:
    """Return the path or URL of the checkpoints to resume from; None for a fresh run.

    A run that would resume from its own folder, or from the store that it uploads to, resumes from
    the one of them with the newest checkpoint: of the latest start, then of the highest step; from
    its folder where neither has one. Collective over the mesh. Raises OSError or ValueError, on all
    ranks.
    """
    url = upload_url(section)
    given, folder = checkpoints.resume_checkpoint_path, Path(checkpoints.checkpoints_path)
    if given is None or url is None:
        return given
    is_own = not is_url(given) and Path(given) == folder
    if not is_own and given.rstrip("/") != url:
        return given
    newest = on_first(mesh, lambda: newest_save(url))
    return (
        str(folder) if newest is None or (is_own and tuple(newest) <= _newest_in(folder)) else url
    )


def upload_url(section: S3UploadConfig | None) -> str | None:
    """Return the URL that a run uploads to; None where it does not."""
    return section.upload_s3_path.rstrip("/") if section and section.upload_s3_path else None


def _goes_on(checkpoints: CheckpointsConfig, section: S3UploadConfig | None) -> bool:
    """Return True where ``checkpoints_path`` holds this run: it was resumed from there."""
    given, folder = checkpoints.resume_checkpoint_path, checkpoints.checkpoints_path
    if given is None:
        return False
    if is_url(given):
        return given.rstrip("/") == upload_url(section)
    return Path(folder) in (Path(given), Path(given).parent)


def _newest_in(folder: Path) -> tuple[int, int]:
    """The highest generation and step of a complete checkpoint in a run folder; else (-1, -1)."""
    steps = steps_in(folder) if folder.is_dir() else []
    held = [complete_manifest(folder / str(step)) for step in steps]
    return max(((m.generation, m.step) for m in held if isinstance(m, Manifest)), default=(-1, -1))
