"""A remote checkpoint to a local folder, file by file; what is there and right is kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kenotron_ckpt.checksums import file_faults, pieces_by_file
from kenotron_ckpt.collective_errors import on_each, on_first_at_length
from kenotron_ckpt.committing import replace_text, sweep
from kenotron_ckpt.folder import (
    CONFIG,
    MANIFEST,
    defect,
    manifest_at,
    manifest_text,
    step_names,
)
from kenotron_ckpt.index import FileEntry, Manifest, Piece
from kenotron_ckpt.preparing import _set_aside_unreadable
from kenotron_ckpt.remote import PAUSE, RANGE_BYTES, TRIES, FsspecStore, RemoteError, RemoteMissing
from kenotron_ckpt.store import LocalStore
from kenotron_ckpt.threads import in_parallel
from kenotron_ckpt.verify_stream import Received
from kenotron_dist import Mesh

THREADS = 8
"""Files that are received at a time."""


@dataclass(frozen=True)
class Download:
    """What a download did."""

    folder: Path
    """The local step folder."""
    received_bytes: int
    """Bytes that were received; the others were there."""
    passed_over: tuple[str, ...] = ()
    """Why each remote checkpoint that would have been preferred was not taken; a sentence each."""


class _Unusable(Exception):
    """Why a remote folder is no checkpoint."""


def download(
    url: str,
    folder: str | Path,
    *,
    step: int | None = None,
    threads: int = THREADS,
    tries: int = TRIES,
    pause: float = PAUSE,
    options: Mapping[str, Any] | None = None,
) -> Download:
    """Make a local copy ``<folder>/<step>/`` of a remote checkpoint. For one rank.

    Arguments:
        url: a remote step folder, or a run folder: the step that its ``latest.txt`` names, else
            the newest, is taken if it is complete, else the next older one.
        folder: the local run folder; made if need be. Its ``latest.txt`` is left alone.
        step: take this one of the run folder, and no other.
        threads, tries, pause, options: as of ``Uploader``.

    Every byte is compared with the checksums in the manifest, which is written last. A download
    that was cut off is taken up where it ended.

    Raises ValueError when no checkpoint there is complete (with all reasons), or when ``folder``
    has another complete checkpoint of that step; RemoteError when the store fails; OSError when
    ``folder`` cannot be written.
    """
    remote = FsspecStore(url, tries=tries, pause=pause, options=options)
    reasons: list[str] = []
    for name in step_names(remote) if step is None else [str(step)]:
        source = remote.at(name)
        try:
            if fault := defect(source):
                raise _Unusable(fault)
            text = manifest_text(source)
            manifest = Manifest.from_json(text)
            target = Path(folder) / str(manifest.step)
            received = _receive_all(source, target, text, manifest, threads)
        except _Unusable as reason:
            reasons.append(f"{source}: {reason}")
        else:
            return Download(target, received, tuple(reasons))
    raise ValueError("\n  ".join([f"no checkpoint at {url} can be used:", *reasons]))


def fetch(
    url: str, folder: str | Path, mesh: Mesh, *, step: int | None = None, **arguments: Any
) -> Download:
    """``download`` on rank 0, into a folder that all ranks share. Collective over the mesh.

    Arguments and errors as of ``download``, on every rank; ValueError also when a rank does not see
    what rank 0 received.
    """

    def run() -> dict[str, Any]:
        done = asdict(download(url, folder, step=step, **arguments))
        return done | {"folder": str(done["folder"])}

    got = on_first_at_length(mesh, f"downloading {url}", run)
    done = Download(Path(got["folder"]), got["received_bytes"], tuple(got["passed_over"]))

    def check() -> None:
        if not (done.folder / MANIFEST).exists():
            raise ValueError(
                f"{done.folder} was downloaded by rank 0 and is not seen by this rank: "
                "checkpoints need a folder that all nodes share"
            )

    on_each(mesh, check)
    return done


def _receive_all(
    source: FsspecStore, target: Path, text: str, manifest: Manifest, threads: int
) -> int:
    """Bring a step folder here; returns the bytes received."""
    _make_room(target, text)
    pieces = pieces_by_file(manifest)
    counts: list[int] = []

    def receive(name: str) -> None:
        _receive(source, target / name, manifest.files[name], pieces[name], counts.append)

    try:
        in_parallel(receive, manifest.files, threads)
    except (RemoteError, _Unusable) as error:
        lost = isinstance(error, RemoteError) and not isinstance(error, RemoteMissing)
        if lost and not error.damaged:
            raise
        with contextlib.suppress(OSError):
            sweep(LocalStore(target))
            target.rmdir()
        raise _Unusable(str(error)) from None
    if manifest.config is not None:
        replace_text(target / CONFIG, manifest.config)
    LocalStore(target).sync()
    replace_text(target / MANIFEST, text)
    return sum(counts)


def _make_room(target: Path, text: str) -> None:
    """The local step folder, without any manifest but the one that shall come.

    A manifest that is not understood stays, in a folder that is set aside.
    """
    _set_aside_unreadable(LocalStore(target))
    target.mkdir(parents=True, exist_ok=True)
    LocalStore(target.parent).sync()
    with contextlib.suppress(FileNotFoundError):
        if (target / MANIFEST).read_text(encoding="utf-8", errors="replace") == text:
            return
        if defect(target) is None:
            raise ValueError(
                f"{target} is another checkpoint of step {manifest_at(target).step} than the "
                "remote one: give another folder, or remove it"
            )
        (target / MANIFEST).unlink()
        LocalStore(target).sync()


def _receive(
    source: FsspecStore,
    target: Path,
    entry: FileEntry,
    pieces: list[Piece],
    count: Callable[[int], None],
) -> None:
    """Bring one file here. Raises _Unusable when its bytes are not those that were written."""
    if not file_faults(LocalStore(target.parent), target.name, entry, pieces):
        return
    part = target.with_name(target.name + ".tmp")
    faults: list[str] = []
    for kept in (True, False):
        if not kept:
            part.unlink(missing_ok=True)
        received = Received(target.name, entry, pieces)
        with part.open("a+b") as file:
            file.seek(0)
            while data := file.read(RANGE_BYTES):
                received.feed(data)
            for data in source.ranges(target.name, file.tell(), entry.bytes):
                file.write(data)
                received.feed(data)
                count(len(data))
            file.flush()
            os.fsync(file.fileno())
        faults = received.faults()
        if not faults:
            part.replace(target)
            return
    part.unlink()
    raise _Unusable("; ".join(faults[:3]))
