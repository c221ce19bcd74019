"""Which old checkpoints may go, and how they go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from kenotron_ckpt.committing import remove, sweep, sync
from kenotron_ckpt.folder import (
    CONFIG,
    MANIFEST,
    VERIFIED,
    defect,
    is_verified,
    latest_step,
    steps_in,
)
from kenotron_ckpt.protocol import Step, passed

_UNMADE = f"{MANIFEST}.old.tmp"
"""What was the manifest while a checkpoint is being removed: a temporary file to all others."""


def prune(
    folder: str | Path,
    keep: int,
    keep_every: int | None = None,
    *,
    busy: Callable[[Path], bool] = lambda _: False,
) -> list[int]:
    """Remove old checkpoints; returns the steps removed, ascending. To be called on one rank.

    Arguments:
        folder: the run folder.
        keep: this many of the newest complete checkpoints stay.
        keep_every: those whose step is a multiple of it stay, too.
        busy: step folders for which it returns True stay (they are being copied elsewhere).

    What ``latest.txt`` names stays in any case, and so does the newest checkpoint that was
    verified: however many damaged ones follow, there is one to go back to. Half-written folders,
    links, and files of others are left alone; a removal that was cut off is finished. Raises
    ValueError unless both numbers are positive.
    """
    check_kept(keep, keep_every)
    folder = Path(folder)
    steps = steps_in(folder)
    # Asked first: what is held now may be gone, by him who holds it, when it no longer is.
    held = {step for step in steps if busy(folder / str(step))}
    whole = [step for step in steps if defect(folder / str(step)) is None]
    verified = [step for step in whole if is_verified(folder / str(step))]
    stay = {*whole[-keep:], latest_step(folder), *verified[-1:]}
    if keep_every is not None:
        stay |= {step for step in whole if step % keep_every == 0}
    rest = [folder / str(step) for step in whole if step not in stay | held]
    doomed = [path for path in rest if not path.is_symlink()]
    begun = [folder / str(step) for step in steps if _begun(folder / str(step))]
    for path in [*begun, *doomed]:
        remove_checkpoint(path)
    return sorted(int(path.name) for path in [*begun, *doomed])


def check_kept(keep: int | None, keep_every: int | None) -> None:
    """Raise ValueError for numbers of checkpoints to keep that make no sense."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep = {keep} would leave no checkpoint; it is at least 1")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every = {keep_every}: it is a number of steps, at least 1")


def _begun(step_folder: Path) -> bool:
    """Whether a removal was cut off: what is left has no owner, unlike a half-written folder."""
    return (step_folder / _UNMADE).exists() and not (step_folder / MANIFEST).exists()


def remove_checkpoint(step_folder: Path) -> None:
    """Remove a checkpoint; its manifest goes first. What others put into its folder stays."""
    if not _begun(step_folder):
        (step_folder / MANIFEST).replace(step_folder / _UNMADE)  # from here on it is no checkpoint
        sync(step_folder)
        passed(Step.UNMADE)
    for name in (CONFIG, VERIFIED):
        remove(step_folder / name)
    sweep(step_folder)  # the shards, and last the mark that they may go
    with contextlib.suppress(OSError):  # files of others
        step_folder.rmdir()
    passed(Step.OLD_REMOVED)
