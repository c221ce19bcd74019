"""Checkpoints in the memory of the host: few steps are lost when a process dies.

They are in a folder of ``checkpoints.memory_path`` that is named after the run's folder and a
number that this folder holds: copies of another run, or of one that was removed, are never read.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from pathlib import Path

from torch import tensor

from kenotron_ckpt import (
    CheckpointsConfig,
    Saver,
    is_url,
    latest_step,
    on_first,
    read_manifest,
    replace_text,
)
from kenotron_dist import Mesh, all_reduce
from kenotron_train.assemble import Training
from kenotron_train.log.report import Report
from kenotron_train.progress import Progress
from kenotron_train.run.own_folder import is_step_of
from kenotron_train.run.saving import bytes_of, save_run

OWNER = "memory_id"
"""File of the run's folder, and of the one in memory, with the number that both have."""
AT_A_TIME = 2
"""Copies that are in memory while one is written."""


class MemoryCopies:
    """Saves a run into memory every few steps; without ``memory_every`` it does nothing.

    Made on all ranks, as a context manager. A run that ends by itself removes its copies.
    """

    def __init__(
        self, training: Training, folder: Path | None, report: Report, saver: Saver
    ) -> None:
        """Check that there is room.

        Args:
            training: the run.
            folder: of ``memory_folder``.
            report: takes warnings.
            saver: of the run's folder: a start that may not save there makes no copies.

        Collective over the mesh. Raises ValueError, on all ranks.
        """
        section = training.config.checkpoints
        self._training, self._report = training, report
        self._every, self._saver = section.memory_every or 0, None
        if folder is not None:
            _check_room(folder, training)
            background = section.checkpointing_engine == "datastates"
            self._saver = Saver(
                folder, training.mesh, background=background, keep=1, on_failure="report",
                generation=saver.generation,
            )  # fmt: skip

    def is_due(self, step: int) -> bool:
        """Return whether a copy is made after a step."""
        return self._saver is not None and step % self._every == 0

    def save(self, progress: Progress) -> None:
        """Copy the run where a copy is due. Collective over the mesh."""
        if self._saver is not None and self.is_due(progress.step):
            save_run(self._saver, self._training, progress, compared=False)

    def wait(self) -> None:
        """Return when the tensors may change. Collective over the mesh."""
        if self._saver is not None:
            self._saver.wait()

    def say(self) -> None:
        """Warn of each copy that failed."""
        for done in self._saver.reports() if self._saver is not None else ():
            if done.failure:
                self._report.say(f"no copy in memory: {done}", "warning")

    def forget(self) -> None:
        """Remove copies of steps that are undone. Collective over the mesh."""
        if (saver := self._saver) is not None:
            saver.finish()
            on_first(saver.mesh, lambda: _remove_steps(saver.folder))

    def remove(self) -> None:
        """Remove the copies: the run's folder has all. Collective over the mesh."""
        if (saver := self._saver) is not None:
            saver.close()
            on_first(saver.mesh, lambda: shutil.rmtree(saver.folder, ignore_errors=True))

    def __enter__(self) -> MemoryCopies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._saver is not None:
            self._saver.__exit__(kind, *error)


def memory_folder(section: CheckpointsConfig, mesh: Mesh) -> Path | None:
    """Make the folder in memory of the run in ``checkpoints_path``; None: it has none.

    Those of earlier runs there are removed. Collective over the mesh.

    Raises:
        ValueError: ``memory_path`` is no folder, or a rank on another host does not see it.
        OSError: it cannot be written.
    """
    if section.memory_every is None:
        return None
    folder = Path(on_first(mesh, lambda: str(_made(section))))
    seen = (folder / OWNER).exists()
    if not all_reduce(tensor([int(seen)], device=mesh.device), mesh.world, op="min"):
        raise ValueError(
            f"checkpoints.memory_path: {section.memory_path} was given; rank {mesh.rank} "
            f"{'sees' if seen else 'does not see'} {folder}, which all ranks must: set "
            "checkpoints.memory_every: null where a run has several hosts"
        )
    return folder


def newer_in_memory(
    folder: Path | None, checkpoints: CheckpointsConfig, url: str | None, given: str | None
) -> tuple[bool, str]:
    """Return whether memory has a later save of this run than the place to resume from.

    That of a later start is the later one, whatever its step is: a host may have copies of a start
    that another one has superseded.

    Args:
        folder: of ``memory_folder``.
        checkpoints: the section.
        url: that the run uploads to.
        given: the place.

    Returns:
        The answer, and a remark on a copy that is not taken.
    """
    copy = None if folder is None else _newest(folder)
    if copy is None:
        return False, ""
    if given is None or not is_own(checkpoints, url, given) or (own := _newest(given)) is None:
        return True, ""
    if copy > own or copy[1] <= own[1]:
        return copy > own, ""
    return False, (
        f"; passed over {folder}: generation {copy[0]} made its copy of step {copy[1]}, and "
        f"generation {own[0]} has saved step {own[1]} since"
    )


def _newest(place: str | Path) -> tuple[int, int] | None:
    """Return generation and step of the checkpoint to resume from; None where there is none."""
    try:
        found = read_manifest(place)
    except ValueError:
        return None
    return found.generation, found.step


def is_own(checkpoints: CheckpointsConfig, url: str | None, given: str) -> bool:
    """Return whether a place has checkpoints of this run: its folder, a step of it, its URL."""
    if is_url(given):
        return url is not None and f"{given}/".startswith(f"{url}/")
    return is_step_of(Path(given), Path(checkpoints.checkpoints_path))


def has_copies(section: CheckpointsConfig) -> bool:
    """Return whether there is a complete copy in memory of the run in ``checkpoints_path``."""
    return any(latest_step(each) is not None for each in _folders(section))


def _remove_steps(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)


def _folders(section: CheckpointsConfig) -> list[Path]:
    return sorted(Path(section.memory_path).glob(f"{_prefix(section)}*"))


def _prefix(section: CheckpointsConfig) -> str:
    run = str(Path(section.checkpoints_path).resolve())
    return f"kenotron-{hashlib.sha256(run.encode()).hexdigest()[:16]}-"


def _made(section: CheckpointsConfig) -> Path:
    """Make the folder, and remove others. On one rank."""
    run, base = Path(section.checkpoints_path), Path(section.memory_path)
    if not base.is_dir():
        raise ValueError(
            f"checkpoints.memory_path: {section.memory_path} was given; it must be a folder that "
            "is there, in memory: /dev/shm on Linux"
        )
    try:
        number = (run / OWNER).read_text().strip()
    except FileNotFoundError:
        number = secrets.token_hex(8)
        run.mkdir(parents=True, exist_ok=True)
        replace_text(run / OWNER, number + "\n")
    folder = base / f"{_prefix(section)}{number}"
    for each in _folders(section):
        if each != folder:
            shutil.rmtree(each, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    replace_text(folder / OWNER, number + "\n")
    return folder


def _check_room(folder: Path, training: Training) -> None:
    mesh = training.mesh
    needed = AT_A_TIME * int(
        all_reduce(tensor([bytes_of(training)], device=mesh.device), mesh.world)
    )

    def check() -> None:
        held = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        room = shutil.disk_usage(folder).free + held
        if room < needed:
            raise ValueError(
                f"checkpoints.memory_every: {training.config.checkpoints.memory_every} was given; "
                f"{AT_A_TIME} copies of this run are {needed / 1e9:.3g} GB, and {folder.parent} "
                f"has room for {room / 1e9:.3g} GB: enlarge it, name another folder in "
                "checkpoints.memory_path, or set memory_every: null"
            )

    on_first(mesh, check)
