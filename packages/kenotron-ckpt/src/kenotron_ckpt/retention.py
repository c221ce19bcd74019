"""Removal of old checkpoints: the choice, and the deletion."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kenotron_ckpt.committing import files_in, sweep
from kenotron_ckpt.folder import (
    CONFIG,
    MANIFEST,
    VERIFIED,
    defect,
    is_verified,
    latest_step,
    steps_in,
)
from kenotron_ckpt.protocol import SaveMoment, passed
from kenotron_ckpt.store import LocalStore, Location, Store, store_at

_UNMADE = f"{MANIFEST}.old.tmp"
"""Name of the manifest while a checkpoint is being removed: a temporary file to all others."""


def prune(
    folder: Location,
    keep: int,
    keep_every: int | None = None,
    *,
    busy: Callable[[Store], bool] = lambda _: False,
) -> list[int]:
    """Remove old checkpoints. To be called on one rank.

    What ``latest.txt`` names stays in any case, and so does the newest checkpoint that was
    verified: however many damaged ones follow, there is one to go back to. Half-written folders,
    links, and files of others are left alone; a removal that was cut off is finished.

    Args:
        folder: the run folder.
        keep: this many of the newest complete checkpoints stay.
        keep_every: those whose step is a multiple of it stay, too.
        busy: step folders for which it returns True stay (they are being copied elsewhere).

    Returns:
        The steps removed, ascending.

    Raises:
        ValueError: a number is not positive.
    """
    check_kept(keep, keep_every)
    run = store_at(folder)
    steps = steps_in(run)
    # Asked first: what is held now may be gone, by him who holds it, when it no longer is.
    held = {step for step in steps if busy(run.at(str(step)))}
    whole = [step for step in steps if defect(run.at(str(step))) is None]
    verified = [step for step in whole if is_verified(run.at(str(step)))]
    stay = {*whole[-keep:], latest_step(run), *verified[-1:]}
    if keep_every is not None:
        stay |= {step for step in whole if step % keep_every == 0}
    rest = [run.at(str(step)) for step in whole if step not in stay | held]
    doomed = [s for s in rest if not (isinstance(s, LocalStore) and s.path.is_symlink())]
    begun = [found for step in steps if _begun(found := run.at(str(step)))]
    for found in [*begun, *doomed]:
        remove_checkpoint(found)
    return sorted(int(found.name) for found in [*begun, *doomed])


def check_kept(keep: int | None, keep_every: int | None) -> None:
    """Raise ValueError for numbers of checkpoints to keep that make no sense."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep = {keep} would leave no checkpoint; it is at least 1")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every = {keep_every}: it is a number of steps, at least 1")


def _begun(step_folder: Store) -> bool:
    """Return True where a removal was cut off: the rest has no owner, unlike half a save."""
    there = files_in(step_folder)
    return _UNMADE in there and MANIFEST not in there


def remove_steps(folder: Location) -> None:
    """Remove all checkpoints of a run folder, and what saves that failed have left. On one rank.

    Raises OSError where some cannot be removed, once the others are gone.
    """
    run = store_at(folder)
    if fault := remove_each(run.at(str(step)) for step in steps_in(run)):
        raise OSError(fault)


def remove_each(step_folders: Iterable[Store]) -> str:
    """Remove checkpoints. Returns why some could not be removed; empty: all were."""
    faults = []
    for each in step_folders:
        try:
            remove_checkpoint(each)
        except OSError as error:
            faults.append(str(error))
    return "; ".join(faults)


def remove_checkpoint(step_folder: Store) -> None:
    """Remove a checkpoint, its manifest first, or what a save that failed has left.

    What others put into its folder stays.
    """
    if MANIFEST in files_in(step_folder):
        step_folder.rename(MANIFEST, _UNMADE)  # from here on it is no checkpoint
        passed(SaveMoment.UNMADE)
    for name in (CONFIG, VERIFIED):
        step_folder.remove(name)
    sweep(step_folder)  # the shards, and last the mark that they may go
    step_folder.remove_folder()  # unless there are files of others
    passed(SaveMoment.OLD_REMOVED)
