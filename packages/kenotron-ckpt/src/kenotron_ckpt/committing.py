"""Writing to a run folder: the order of a commit, and files that change at one stroke.

``<step>/manifest.json`` makes a checkpoint; ``latest.txt`` names the step to resume from.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kenotron_ckpt.folder import CONFIG, LATEST, MANIFEST, SHARDS, VERIFIED, manifest_at, seal_at
from kenotron_ckpt.index import Manifest
from kenotron_ckpt.protocol import Step, passed


def make(folder: Path) -> None:
    """Have a folder, and those above it, on the disk: each is an entry of the one above."""
    make(folder.parent) if not folder.parent.exists() else None
    folder.mkdir(exist_ok=True)
    sync(folder.parent)
    passed(Step.FOLDER_MADE)


def commit(step_folder: Path, manifest: Manifest, verified: bool = False) -> None:
    """Make what lies in a step folder a checkpoint, and the latest one.

    The rename of ``manifest.json`` is the commit: before it the former checkpoint stands, if there
    was one, after it the new. ``verified``: every file was read back. Raises ValueError
    when a file is not there as written.
    """
    for name, entry in manifest.files.items():
        path = step_folder / name
        if not path.exists() or path.stat().st_size != entry.bytes:
            raise ValueError(
                f"{path} was written by some rank, but rank 0 does not see it whole: "
                "checkpoints need a folder that all nodes share"
            )
    if manifest.config is not None:
        replace_text(step_folder / CONFIG, manifest.config)
    sync(step_folder)
    passed(Step.FOLDER_SYNCED)
    replace_text(step_folder / MANIFEST, manifest.to_json())
    passed(Step.COMMITTED)
    if verified:
        mark_verified(step_folder)
    else:  # what is there was said of the former checkpoint
        remove(step_folder / VERIFIED)
    if manifest.config is None:
        remove(step_folder / CONFIG)
    replace_text(step_folder.parent / LATEST, str(manifest.step))
    passed(Step.POINTED)
    sweep(step_folder)


def sweep(step_folder: Path) -> None:
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
    for path in [*step_folder.glob(SHARDS), *step_folder.glob("*.tmp")]:
        if path.name not in kept:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        passed(Step.LEFTOVER_REMOVED)


def replace_text(path: Path, text: str) -> None:
    """Give a file new text at one stroke: readers see the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        passed(Step.TEXT_OPENED)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    passed(Step.TEXT_WRITTEN)
    temporary.replace(path)
    passed(Step.TEXT_RENAMED)
    sync(path.parent)


def mark_verified(step_folder: Path) -> None:
    """Note that every byte of a checkpoint was read and found right."""
    replace_text(step_folder / VERIFIED, seal_at(step_folder))
    passed(Step.MARKED)


def sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
