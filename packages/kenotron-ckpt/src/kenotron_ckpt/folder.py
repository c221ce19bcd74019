"""Finding checkpoints in a store: which step folders there are, and which of them are whole.

``<step>/manifest.json`` makes a checkpoint; ``latest.txt`` names the step to resume from.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from kenotron_ckpt.index import Manifest, seal_of
from kenotron_ckpt.remote import RemoteError, RemoteMissing
from kenotron_ckpt.store import (
    ABSENT,
    LINK,
    LocalStore,
    Location,
    Store,
    store_at,
)

MANIFEST = "manifest.json"
"""Name of the file that commits a checkpoint: written last."""
CONFIG = "config.yaml"
LATEST = "latest.txt"
"""Name of the file of a run folder that names the step to resume from."""
VERIFIED = "verified.txt"
SHARDS = "shard-*.safetensors"
LONGEST_MANIFEST = 2 << 30  # bytes; a record takes some 200
_NANOTRON = "checkpoint_metadata.json"
NANOTRONS = (
    "it is a checkpoint of Nanotron: `python -m kenotron_nanotron` makes one of ours "
    "of it, in another folder"
)
_TRANSFORMERS = (
    "it has config.json, as models of transformers: `kenotron convert hf-to-kenotron` makes a "
    "checkpoint of such a model, in another folder",
)


def read_manifest(path: Location) -> Manifest:
    """The manifest at ``path``, as ``preferred`` finds it, whose ValueError it raises."""
    return preferred(path)[1]


def newest_save(path: Location) -> tuple[int, int] | None:
    """Generation and step of ``read_manifest``; None where there is none. Raises RemoteError."""
    try:
        found = read_manifest(path)
    except ValueError:
        return None
    return found.generation, found.step


def manifest_at(step_folder: Location) -> Manifest:
    """The manifest in a step folder. Raises ValueError when it is invalid, OSError without one."""
    return Manifest.from_json(manifest_text(store_at(step_folder)))


def manifest_text(store: Store) -> str:
    """The text of the manifest in a step folder. Raises ValueError for no text, OSError."""
    if (length := store.size(MANIFEST)) > LONGEST_MANIFEST:
        raise ValueError(f"{MANIFEST} is damaged: it has {length} bytes, more than a manifest has")
    data = store.read(MANIFEST)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{MANIFEST} is damaged: it is not text ({error})") from None


def resolve_step(path: Location) -> Path | str:
    """Path or URL of the step folder that ``preferred`` finds, whose ValueError it raises."""
    store, _ = preferred(path)
    return store.path if isinstance(store, LocalStore) else str(store)


def preferred(path: Location) -> tuple[Store, Manifest]:
    """The step folder that ``path`` means: itself, or the first complete one of a run folder.

    Complete means that the manifest is valid and every file has its length; bytes are not read.
    Raises ValueError when it does not exist, is no checkpoint, or is a half-written one;
    RemoteError when a remote store fails.
    """
    store = store_at(path)
    found = step_names(store)
    faults = []
    for name in found:
        held = complete_manifest(store.at(name))
        if isinstance(held, Manifest):
            return store.at(name), held
        faults.append(held)
    if found == [""]:
        raise ValueError(f"the checkpoint at {path} cannot be read: {faults[0]}")
    lines = [f"{name}: {fault}" for name, fault in zip(found, faults, strict=True)]
    raise ValueError("\n  ".join([f"no checkpoint in {path} is complete:", *lines]))


def step_names(store: Store) -> list[str]:
    """Names of the step folders in a run folder, to try in turn; of a step folder, ``[""]``.

    What ``latest.txt`` names comes first, then the newest. Raises ValueError when there are none,
    RemoteError when a remote store fails.
    """
    try:
        there = store.listing()
    except FileNotFoundError:
        raise ValueError(f"no checkpoint at {store}: the path does not exist") from None
    except NotADirectoryError:
        raise ValueError(
            f"no checkpoint at {store}: it is a file; give the folder it lies in"
        ) from None
    if MANIFEST in there:
        return [""]
    if _NANOTRON in there:
        raise ValueError(f"no checkpoint at {store}: {NANOTRONS}")
    steps = _steps(there)
    if not steps and any(fnmatch(name, SHARDS) for name in there):
        return [""]
    if not steps:
        neither = (
            f"it has neither a {MANIFEST} (a step folder) nor folders named by numbers (a run "
            "folder)"
        )
        found = _TRANSFORMERS if "config.json" in there else neither
        raise ValueError(f"no checkpoint at {store}: {found}")
    named = latest_named(store)
    return [str(step) for step in sorted(steps, key=lambda step: (step != named, -step))]


def points_nowhere(store: Store, found: Sequence[str]) -> bool:
    """Return True where a run's ``latest.txt`` names none of the step folders ``found`` in it."""
    if found == [""] or LATEST not in store.listing():  # a step folder, or there is none
        return False
    return str(latest_named(store)) not in found


def passed_over(step_folder: Location) -> list[int]:
    """Newer steps next to a step folder, ascending: damaged, unfinished, or not asked for."""
    chosen = store_at(step_folder)
    if not chosen.name.isdecimal():
        return []
    return [step for step in steps_in(chosen.parent) if step > int(chosen.name)]


def latest_step(folder: Location) -> int | None:
    """The step to resume from: what ``latest.txt`` names, if it is complete, else the newest.

    None when no checkpoint in the run folder is complete. Raises RemoteError when a remote store
    fails, ValueError for a URL that cannot be opened.
    """
    store = store_at(folder)
    try:
        found = [store.at(name) for name in step_names(store)]
    except ValueError:
        return None
    return next((int(each.name) for each in found if defect(each) is None), None)


def has_manifests(folder: Path, steps: Iterable[int] | None = None) -> bool:
    """Return True where one of ``steps`` (default: all) of a run has a manifest, valid or not.

    What cannot be looked at (no permission, a lost file system) counts as a manifest. Raises
    OSError when the run folder cannot be listed.
    """
    if steps is None:
        steps = steps_in(folder) if _is_folder(folder) else ()
    return any(_may_exist(folder / str(step) / MANIFEST) for step in steps)


def latest_named(folder: Location) -> int | None:
    """The number in ``latest.txt``; None when there is none. Raises RemoteError."""
    try:
        return int(store_at(folder).read(LATEST))
    except RemoteMissing:
        return None
    except RemoteError:  # it may name an older step
        raise
    except (OSError, ValueError):
        return None


def defect(step_folder: Location) -> str | None:
    """Return why a step folder is not a complete checkpoint, None when it is; see below."""
    found = complete_manifest(step_folder)
    return found if isinstance(found, str) else None


def complete_manifest(step_folder: Location) -> Manifest | str:
    """Return the manifest of a complete checkpoint, or why a step folder is none.

    Raises RemoteError when a remote store fails.
    """
    store = store_at(step_folder)
    try:
        manifest = manifest_at(store)
        there = store.listing()
    except FileNotFoundError as error:
        if error.strerror == LINK:
            return f"{MANIFEST} {LINK}"
        return _half_written(store)
    except (OSError, ValueError) as error:
        if isinstance(error, RemoteError) and not error.damaged:
            raise
        file = getattr(error, "filename", None)  # of one that cannot be looked at
        return f"{Path(file).name} cannot be read: {error}" if file else str(error)
    if store.name.isdecimal() and int(store.name) != manifest.step:
        return f"its {MANIFEST} is of step {manifest.step}: the folder was renamed, or copied into"
    for name, entry in manifest.files.items():
        size = there.get(name)
        if size is None:
            return f"{name} is missing"
        if size != entry.bytes:
            return f"{name} is {size} bytes long, but {MANIFEST} says {entry.bytes}"
    return manifest


def _half_written(store: Store) -> str:
    """Return why a folder without a manifest is no checkpoint."""
    try:
        if _NANOTRON in store.listing():
            return NANOTRONS
    except FileNotFoundError:
        pass
    return f"it is half-written: there is no {MANIFEST}, so the save did not finish"


def is_verified(step_folder: Location) -> bool:
    """Return True where this very checkpoint was found right byte for byte, and is complete."""
    store = store_at(step_folder)
    try:
        seal = store.read(VERIFIED).decode()
        return defect(store) is None and seal_at(store) == seal
    except (OSError, ValueError):
        return False


def seal_at(step_folder: Location) -> str:
    """The checksum at the end of the manifest in a step folder."""
    return seal_of(manifest_text(store_at(step_folder)))


def steps_in(folder: Location) -> list[int]:
    """Steps that have a folder, complete or not, ascending. ``007`` is no step's folder."""
    return _steps(store_at(folder).listing())


def _steps(there: dict[str, int | None]) -> list[int]:
    names = (name for name, size in there.items() if size is None and name.isdecimal())
    return sorted(int(name) for name in names if name == str(int(name)))


def _is_folder(path: Path) -> bool:
    """Return True for a folder. Raises OSError when that cannot be found out."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise


def _may_exist(path: Path) -> bool:
    """False only where a file is known not to exist; a link to nothing exists."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno not in ABSENT
    return True
