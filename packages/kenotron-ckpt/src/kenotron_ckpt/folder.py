"""Folders: where a checkpoint lies, whether it is whole, and the one moment it becomes so.

``<step>/manifest.json`` makes a checkpoint; ``latest.txt`` names the step to resume from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from kenotron_ckpt.index import Manifest, seal_of
from kenotron_ckpt.protocol import Step, passed

MANIFEST = "manifest.json"
"""Name of the file that commits a checkpoint: written last."""
CONFIG = "config.yaml"
LATEST = "latest.txt"
VERIFIED = "verified.txt"
SHARDS = "shard-*.safetensors"
LONGEST_MANIFEST = 2 << 30  # bytes; a record takes some 200
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors that say that a path does not exist; others leave it open."""


def read_manifest(path: str | Path) -> Manifest:
    """The manifest at ``path``, as ``resolve`` finds it, whose ValueError it raises."""
    return manifest_at(resolve(path))


def manifest_at(step_folder: Path) -> Manifest:
    """The manifest in a step folder. Raises ValueError when it is invalid, OSError without one."""
    path = step_folder / MANIFEST
    if (length := path.stat().st_size) > LONGEST_MANIFEST:
        raise ValueError(f"{MANIFEST} is damaged: it has {length} bytes, more than a manifest has")
    data = path.read_bytes()
    try:
        return Manifest.from_json(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{MANIFEST} is damaged: it is not text ({error})") from None


def resolve(path: str | Path) -> Path:
    """The step folder that ``path`` means: itself, or the first complete one of a run folder.

    Complete means that the manifest is valid and every file has its length; bytes are not read.
    Raises ValueError when it does not exist, is no checkpoint, or is a half-written one.
    """
    found = candidates(path)
    faults = []
    for folder in found:
        fault = defect(folder)
        if fault is None:
            return folder
        faults.append(fault)
    if found == [Path(path)]:
        raise ValueError(f"the checkpoint at {path} cannot be read: {faults[0]}")
    lines = [f"{each.name}: {fault}" for each, fault in zip(found, faults, strict=True)]
    raise ValueError("\n  ".join([f"no checkpoint in {path} is complete:", *lines]))


def candidates(path: str | Path) -> list[Path]:
    """Step folders to try in turn: ``path`` itself, or those of a run folder.

    What ``latest.txt`` names comes first, then the newest. Raises ValueError when there are none.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no checkpoint at {path}: the path does not exist")
    if not path.is_dir():
        raise ValueError(f"no checkpoint at {path}: it is a file; give the folder it lies in")
    if (path / MANIFEST).exists():
        return [path]
    if is_nanotron(path):
        raise ValueError(f"no checkpoint at {path}: {NANOTRONS}")
    steps = steps_in(path)
    if not steps and any(path.glob(SHARDS)):
        return [path]
    if not steps:
        raise ValueError(
            f"no checkpoint at {path}: it has neither a {MANIFEST} (a step folder) nor folders "
            "named by numbers (a run folder)"
        )
    named = latest_named(path)
    return [path / str(s) for s in sorted(steps, key=lambda s: (s != named, -s))]


def points_nowhere(path: Path, found: Sequence[Path]) -> bool:
    """Whether the ``latest.txt`` of a run folder names none of the step folders ``found`` in it."""
    if path in found or not (path / LATEST).exists():  # ``path`` is a step folder, or has none
        return False
    return path / str(latest_named(path)) not in found


def passed_over(step_folder: str | Path) -> list[int]:
    """Newer steps next to a step folder, ascending: damaged, unfinished, or not asked for."""
    chosen = Path(step_folder)
    if not chosen.name.isdecimal():
        return []
    return [step for step in steps_in(chosen.parent) if step > int(chosen.name)]


def latest_step(folder: str | Path) -> int | None:
    """The step to resume from: what ``latest.txt`` names, if it is complete, else the newest.

    None when no checkpoint in the run folder is complete.
    """
    try:
        found = candidates(folder)
    except ValueError:
        return None
    return next((int(each.name) for each in found if defect(each) is None), None)


def has_manifests(folder: Path, steps: Iterable[int] | None = None) -> bool:
    """Whether one of ``steps`` (default: all) of a run folder has a manifest, valid or not.

    What cannot be looked at (no permission, a lost file system) counts as a manifest. Raises
    OSError when the run folder cannot be listed.
    """
    if steps is None:
        steps = steps_in(folder) if _is_folder(folder) else ()
    return any(_may_exist(folder / str(step) / MANIFEST) for step in steps)


def latest_named(folder: Path) -> int | None:
    """The number in ``latest.txt``; None when there is none."""
    try:
        return int((folder / LATEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


NANOTRONS = (
    "it is a checkpoint of Nanotron: `python -m kenotron_ckpt import-nanotron` makes one of ours "
    "of it, in another folder"
)


def is_nanotron(step_folder: Path) -> bool:
    """Whether a folder holds a checkpoint in Nanotron's layout."""
    return (step_folder / "checkpoint_metadata.json").exists()


def defect(step_folder: Path, manifest: Manifest | None = None) -> str | None:
    """Why a step folder is not a complete checkpoint, None when it is; its manifest if read."""
    try:
        manifest = manifest or manifest_at(step_folder)
    except FileNotFoundError:
        if is_nanotron(step_folder):
            return NANOTRONS
        half = f"it is half-written: there is no {MANIFEST}, so the save did not finish"
        return f"{MANIFEST} is a link to nothing" if (step_folder / MANIFEST).is_symlink() else half
    except (OSError, ValueError) as error:
        return str(error)
    if step_folder.name.isdecimal() and int(step_folder.name) != manifest.step:
        return f"its {MANIFEST} is of step {manifest.step}: the folder was renamed, or copied into"
    for name, entry in manifest.files.items():
        try:
            size = (step_folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if size != entry.bytes:
            return f"{name} is {size} bytes long, but {MANIFEST} says {entry.bytes}"
    return None


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
    replace_text(step_folder / VERIFIED, _seal(step_folder))
    passed(Step.MARKED)


def is_verified(step_folder: Path) -> bool:
    """Whether ``mark_verified`` was said of this very checkpoint, and it is still complete."""
    try:
        seal = (step_folder / VERIFIED).read_text(encoding="utf-8")
        return defect(step_folder) is None and _seal(step_folder) == seal
    except (OSError, ValueError):
        return False


def sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def steps_in(folder: Path) -> list[int]:
    """Steps that have a folder, complete or not, ascending. ``007`` is no step's folder."""
    names = (path.name for path in folder.iterdir() if path.name.isdecimal() and _is_folder(path))
    return sorted(int(name) for name in names if name == str(int(name)))


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder. Raises OSError when that cannot be found out."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise


def _may_exist(path: Path) -> bool:
    """False only where a file is known not to exist; a link to nothing exists."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno not in _ABSENT
    return True


def _seal(step_folder: Path) -> str:
    return seal_of((step_folder / MANIFEST).read_text(encoding="utf-8"))
