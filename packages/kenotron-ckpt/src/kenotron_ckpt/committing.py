"""The commit: the order of writes that makes what lies in a step folder of any store a checkpoint.

``<step>/manifest.json`` makes a checkpoint; ``latest.txt`` names the step to resume from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from kenotron_ckpt.folder import CONFIG, LATEST, MANIFEST, SHARDS, VERIFIED, manifest_at, seal_at
from kenotron_ckpt.index import Manifest
from kenotron_ckpt.protocol import SaveMoment, passed
from kenotron_ckpt.store import LocalStore, Location, Store, store_at
from kenotron_ckpt.threads import in_parallel

INTENT = "uploading.txt"
"""Holds the checksum of the manifest whose files are being uploaded, until they are committed."""


def commit(
    step_folder: Store,
    manifest: Manifest,
    *,
    verified: bool = False,
    latest: bool = True,
    text: str = "",
    here: Iterable[str] | None = None,
) -> None:
    """Make what lies in a step folder a checkpoint, and the latest one.

    Writing ``manifest.json`` at one stroke is the commit: before it the former checkpoint stands,
    if there was one, after it the new.

    Args:
        step_folder: where the files of ``manifest`` are.
        manifest: of the checkpoint.
        verified: every file was read back.
        latest: let ``latest.txt`` name it.
        text: of ``manifest.json``, where the manifest was read from one.
        here: files that must be there; None: all.

    Raises:
        ValueError: a file is not there as written.
        OSError: the store cannot be written.
    """
    due = manifest.files if here is None else here
    in_parallel(lambda name: _check(step_folder, manifest, name), due, 8)
    if manifest.config is not None:
        step_folder.write_text(CONFIG, manifest.config)
    step_folder.sync()
    passed(SaveMoment.FOLDER_SYNCED)
    step_folder.write_text(MANIFEST, text or manifest.to_json())
    passed(SaveMoment.COMMITTED)
    if verified:
        mark_verified(step_folder)
    else:  # what is there was said of the former checkpoint
        step_folder.remove(VERIFIED)
    if manifest.config is None:
        step_folder.remove(CONFIG)
    if latest:
        prefer_step(step_folder.parent, manifest.step)
        passed(SaveMoment.POINTED)
    with contextlib.suppress(OSError):  # the next save to this folder removes what is left
        sweep(step_folder)


def prefer_step(run: Location, step: int) -> None:
    """Let ``latest.txt`` of a run folder name a step: a resume begins there. Raises OSError."""
    store_at(run).write_text(LATEST, str(step))


def _check(step_folder: Store, manifest: Manifest, name: str) -> None:
    """Raise ValueError unless a file has its length. A listing may be old on a shared folder."""
    length, size = manifest.files[name].bytes, -1
    with contextlib.suppress(FileNotFoundError):
        size = step_folder.size(name)
    if size != length:
        raise ValueError(
            f"{step_folder.at(name)} was written by some rank, but rank 0 does not see it whole: "
            "checkpoints need a folder that all nodes share"
        )


def sweep(step_folder: Store) -> None:
    """Remove shard files that no manifest names, and temporary files.

    Nothing is removed next to a manifest that is not understood. Raises OSError when there is a
    manifest that cannot be read just now: nothing is removed then, either.
    """
    try:
        kept = set(manifest_at(step_folder).files)
    except FileNotFoundError:
        kept = set()
    except ValueError:
        return
    found = [name for name in files_in(step_folder) if name not in kept]
    shards = [name for name in found if fnmatch(name, SHARDS)]
    for name in [*shards, *(name for name in found if name.endswith((".tmp", INTENT)))]:
        step_folder.remove(name)


def files_in(step_folder: Store) -> dict[str, int | None]:
    """Names and lengths of what is in a step folder; empty where there is no folder."""
    with contextlib.suppress(FileNotFoundError):
        return step_folder.listing()
    return {}


def replace_text(path: Path, text: str) -> None:
    """Give a local file new text at one stroke: readers see the old text or the new."""
    LocalStore(path.parent).write_text(path.name, text)


def mark_verified(step_folder: Store) -> None:
    """Note that every byte of a checkpoint was read and found right."""
    step_folder.write_text(VERIFIED, seal_at(step_folder))
    passed(SaveMoment.MARKED)
