"""A run that is set back to one of its checkpoints: later ones are left behind."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from kenotron_ckpt import (
    LATEST,
    CheckpointsConfig,
    has_manifests,
    latest_step,
    on_first,
    prefer_step,
)
from kenotron_dist import Mesh
from kenotron_train.run.memory_copies import MemoryCopies
from kenotron_train.run.memory_folder import has_copies
from kenotron_train.run.own_folder import sets_back


def set_back(section: CheckpointsConfig, step: int, copies: MemoryCopies, mesh: Mesh) -> None:
    """Let the folder of a run that is set back name the step that was loaded.

    Restarts resume from there; copies in memory are removed. Call it while the folder is locked.
    Collective over the mesh. Raises OSError, on all ranks.
    """
    if not sets_back(section):
        return

    def point() -> None:
        if has_manifests(folder := Path(section.checkpoints_path), [step]):
            prefer_step(folder, step)

    on_first(mesh, point)
    copies.forget()


class SetBack:
    """The checkpoint that a run is set back to when it is started, if it is."""

    def __init__(self, section: CheckpointsConfig) -> None:
        """``section``: with which the run is started."""
        self._step: int | None = None
        self._before = _pointer(section)
        if sets_back(section):
            name = Path(str(section.resume_checkpoint_path)).name
            folder = section.checkpoints_path
            self._step = int(name) if name.isdecimal() else latest_step(folder)

    def after_a_loss(self, section: CheckpointsConfig) -> CheckpointsConfig:
        """Return the section for the ranks that are left.

        A run that has not saved since it was set back is set back again, as it was the first time;
        one that has saved, on the disk or in memory, resumes from there.
        """
        if self._step is None or _pointer(section) == self._before:
            return section
        if latest_step(section.checkpoints_path) == self._step and not has_copies(section):
            return section
        return replace(section, resume_checkpoint_path=None)


def _pointer(section: CheckpointsConfig) -> tuple[int, int] | None:
    """Identity of the file that names the newest checkpoint: another one after each save."""
    with contextlib.suppress(OSError):
        found = (Path(section.checkpoints_path) / LATEST).stat()
        return found.st_ino, found.st_mtime_ns
    return None
