"""Folders: where a checkpoint lies, whether it is whole, and the one moment it becomes so.

``<folder>/<step>/manifest.json`` makes a checkpoint; ``<folder>/latest.txt`` holds the step that a
resume starts from.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from kenotron_ckpt.index import Manifest

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
LATEST = "latest.txt"
SHARDS = "shard-*.safetensors"


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a step folder, or of a run folder's latest checkpoint.

    Raises ValueError when there is none (see ``resolve``).
    """
    return manifest_at(resolve(path))


def manifest_at(step_folder: Path) -> Manifest:
    """The manifest in a step folder. Raises ValueError when it is invalid, OSError without one."""
    return Manifest.from_json((step_folder / MANIFEST).read_text(encoding="utf-8"))


def resolve(path: str | Path) -> Path:
    """The step folder that ``path`` means: itself, or the latest one of a run folder.

    Raises ValueError when it does not exist, is no checkpoint, or is a half-written one.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no checkpoint at {path}: the path does not exist")
    if not path.is_dir():
        raise ValueError(f"no checkpoint at {path}: it is a file; give the folder it lies in")
    if (path / MANIFEST).exists() or any(path.glob(SHARDS)):
        fault = defect(path)
        if fault:
            raise ValueError(f"the checkpoint at {path} cannot be read: {fault}")
        return path
    step = latest_step(path)
    if step is not None:
        return path / str(step)
    steps = _steps(path)
    if not steps:
        raise ValueError(
            f"no checkpoint at {path}: it has neither a {MANIFEST} (a step folder) nor folders "
            "named by numbers (a run folder)"
        )
    faults = "".join(f"\n  {step}: {defect(path / str(step))}" for step in steps)
    raise ValueError(f"no checkpoint in {path} is complete:{faults}")


def passed_over(step_folder: str | Path) -> list[int]:
    """Newer steps beside a step folder, ascending: damaged, unfinished, or not asked for."""
    chosen = Path(step_folder)
    names = [entry.name for entry in chosen.parent.iterdir() if entry.is_dir()]
    steps = sorted(int(name) for name in names if name.isdecimal())
    return [step for step in steps if chosen.name.isdecimal() and step > int(chosen.name)]


def latest_step(folder: str | Path) -> int | None:
    """The step to resume from: what ``latest.txt`` names, if it is complete, else the newest.

    None when no checkpoint in the run folder is complete. Complete means that the manifest is
    valid and every file has its length; bytes are not read.
    """
    folder = Path(folder)
    with contextlib.suppress(OSError, ValueError):
        step = int((folder / LATEST).read_text(encoding="utf-8"))
        if defect(folder / str(step)) is None:
            return step
    return next((step for step in reversed(_steps(folder)) if not defect(folder / str(step))), None)


def defect(step_folder: Path) -> str | None:
    """Why a step folder is not a complete checkpoint; None when it is one."""
    try:
        manifest = manifest_at(step_folder)
    except FileNotFoundError:
        return f"it is half-written: there is no {MANIFEST}, so the save did not finish"
    except (OSError, ValueError) as error:
        return str(error)
    for name, entry in manifest.files.items():
        with contextlib.suppress(FileNotFoundError):
            size = (step_folder / name).stat().st_size
            if size == entry.bytes:
                continue
            return f"{name} is {size} bytes long, but {MANIFEST} says {entry.bytes}"
        return f"{name} is missing"
    return None


def prepare(step_folder: Path) -> str:
    """Make a folder ready to be written; returns the tag that new files carry in their names.

    Left-overs of a save that did not finish are removed. The files of a complete checkpoint stay:
    the tag keeps new ones apart from them until the new manifest takes the place of the old.
    """
    step_folder.mkdir(parents=True, exist_ok=True)
    sync(step_folder.parent)
    sweep(step_folder)
    tags = {_tag(path.name) for path in step_folder.glob(SHARDS)}
    return next(tag for tag in ("", ".v1", ".v2") if tag not in tags)


def commit(step_folder: Path, manifest: Manifest) -> None:
    """Make what lies in a step folder a checkpoint, and the latest one.

    The rename of ``manifest.json`` is the commit: before it the former checkpoint stands, if there
    was one, after it the new. Raises ValueError when a file is not there as written.
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
    replace_text(step_folder / MANIFEST, manifest.to_json())
    replace_text(step_folder.parent / LATEST, str(manifest.step))
    sweep(step_folder)


def sweep(step_folder: Path) -> None:
    """Remove shard files that no manifest names, and temporary files."""
    try:
        kept = set(manifest_at(step_folder).files)
    except (OSError, ValueError):
        kept = set()
    for path in [*step_folder.glob(SHARDS), *step_folder.glob("*.tmp")]:
        if path.name not in kept:
            path.unlink()


def prune(folder: str | Path, keep: int) -> list[int]:
    """Remove all but the ``keep`` newest complete checkpoints; returns the steps removed.

    The one that ``latest.txt`` names stays, too. Half-written ones and files of others are left
    alone. To be called on one rank. Raises ValueError unless ``keep`` is positive.
    """
    if keep < 1:
        raise ValueError(f"prune: keep = {keep} would leave no checkpoint; it is at least 1")
    folder = Path(folder)
    whole = [step for step in _steps(folder) if defect(folder / str(step)) is None]
    doomed = [step for step in whole[:-keep] if step != latest_step(folder)]
    for step in doomed:
        step_folder = folder / str(step)
        (step_folder / MANIFEST).unlink()  # from here on it is no checkpoint
        sync(step_folder)
        sweep(step_folder)
        (step_folder / CONFIG).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files
            step_folder.rmdir()
    return doomed


def replace_text(path: Path, text: str) -> None:
    """Give a file new text at one stroke: readers see the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(folder: Path) -> list[int]:
    """Steps that have a folder, complete or not, in ascending order."""
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def _tag(name: str) -> str:
    found = re.search(r"\.v\d+(?=\.)", name)
    return found.group() if found else ""
