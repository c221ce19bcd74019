"""Which old checkpoints may go, and how they go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from kenotron_ckpt.folder import (
    CONFIG,
    MANIFEST,
    VERIFIED,
    defect,
    is_verified,
    latest_step,
    steps_in,
    sweep,
    sync,
)
from kenotron_ckpt.protocol import Step, passed


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
        busy: step folders of which it says True stay (they are being copied elsewhere).

    What ``latest.txt`` names stays in any case, and so does the newest checkpoint that was
    verified: however many damaged ones follow, there is one to go back to. Half-written folders
    and files of others are left alone. Raises ValueError unless both numbers are positive.
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
    doomed = [step for step in whole if step not in stay | held]
    for step in doomed:
        remove(folder / str(step))
    return doomed


def check_kept(keep: int | None, keep_every: int | None) -> None:
    """Raise ValueError for numbers of checkpoints to keep that make no sense."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep = {keep} would leave no checkpoint; it is at least 1")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every = {keep_every}: it is a number of steps, at least 1")


def remove(step_folder: Path) -> None:
    """Remove a checkpoint; its manifest goes first. What others put into its folder stays."""
    (step_folder / MANIFEST).unlink()  # from here on it is no checkpoint
    sync(step_folder)
    passed(Step.UNMADE)
    sweep(step_folder)
    for name in (CONFIG, VERIFIED):
        (step_folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's files
        step_folder.rmdir()
    passed(Step.OLD_REMOVED)
