"""Copies of a run in the memory of its hosts: few steps are lost when a process or a host dies."""

from __future__ import annotations

import shutil

from kenotron_ckpt import (
    DataStatesConfig,
    HostSaver,
    Saver,
    on_each,
    on_first,
    remove_steps,
)
from kenotron_train.assemble import TrainingRun
from kenotron_train.log.report import Report
from kenotron_train.progress import Progress
from kenotron_train.run.memory_folder import MemoryFolder
from kenotron_train.run.saving import bytes_of, save_run

AT_A_TIME = 2
"""Copies that are in memory while one is written."""


class MemoryCopies:
    """Saves a run into memory every few steps; without ``memory_every`` it does nothing.

    Where there are several hosts, each has a copy of the files of the one before it. Made on all
    ranks, as a context manager. A run that ends by itself removes its copies.
    """

    def __init__(
        self, training: TrainingRun, memory: MemoryFolder | None, report: Report, saver: Saver
    ) -> None:
        """Check that there is room.

        Args:
            training: the run.
            memory: of ``memory_folder``.
            report: takes warnings.
            saver: of the run's folder: a start that may not save there makes no copies.

        Collective over the mesh. Raises ValueError, on all ranks.
        """
        section = training.checkpoints.section
        self._training, self._report = training, report
        self._every = section.memory_every or 0
        self._saver: Saver | HostSaver | None = None
        self._latest = 0
        if memory is None:
            return
        _check_room(memory, training)
        pool = section.datastates or DataStatesConfig()
        how = {
            "background": section.checkpointing_engine == "datastates",
            "pool_bytes": pool.pool_bytes, "pin": pool.pin_host_cache,
            "threads": pool.parser_threads, "generation": saver.generation,
        }  # fmt: skip
        if memory.hosts is not None:
            self._saver = HostSaver(memory.hosts, **how)
        else:
            self._saver = Saver(memory.path, training.mesh, keep=1, on_failure="report", **how)

    def is_due(self, step: int) -> bool:
        """Return whether a copy is made after a step."""
        return bool(self._every) and step % self._every == 0

    def save(self, progress: Progress) -> None:
        """Copy the run where a copy is due. Collective over the mesh."""
        if self._saver is not None and self.is_due(progress.step):
            save_run(self._saver, self._training, progress, compared=False)

    def wait(self) -> None:
        """Return when the tensors may change. Collective over the mesh."""
        if self._saver is not None:
            self._saver.wait()

    def finish(self, step: int) -> bool:
        """Wait for the copy under way; return whether the latest one is that of ``step``.

        Collective over the mesh.
        """
        if self._saver is not None:
            self._saver.finish()
        self.say()
        return self._latest == step

    def say(self) -> None:
        """Warn of each copy that failed."""
        for done in self._saver.reports() if self._saver is not None else ():
            if not done.failure:
                self._latest = done.step
            else:
                self._report.say(f"no copy in memory: {done}", "warning")
            if done.follow_up:
                self._report.say(
                    f"the copy in {done.store} stands, but {done.follow_up}", "warning"
                )

    def forget(self) -> None:
        """Remove copies of steps that are undone, or warn. Collective over the mesh."""
        if (saver := self._saver) is None:
            return
        saver.finish()
        try:
            if isinstance(saver, HostSaver):
                fault = saver.copies.remove_steps()
            else:
                fault = on_first(saver.mesh, lambda: remove_steps(saver.store)) or ""
        except OSError as error:
            fault = str(error)
        if fault:
            self._report.say(
                f"copies in memory of steps that are undone are still there: {fault}; a start that "
                "comes before the next copy may resume from one: remove them",
                "warning",
            )

    def remove(self) -> None:
        """Remove the copies: the run's folder has all. Collective over the mesh."""
        if (saver := self._saver) is None:
            return
        saver.close()
        if isinstance(saver, HostSaver):
            saver.copies.remove()
        else:
            on_first(saver.mesh, lambda: shutil.rmtree(saver.folder, ignore_errors=True))

    def __enter__(self) -> MemoryCopies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._saver is not None:
            self._saver.__exit__(kind, *error)


def _check_room(memory: MemoryFolder, training: TrainingRun) -> None:
    mesh, hosts = training.mesh, memory.hosts
    parts = on_each(mesh, lambda: bytes_of(training))
    stored = hosts.stored_ranks() if hosts else range(mesh.world.size)
    needed = AT_A_TIME * sum(parts[rank] for rank in stored)

    def check() -> None:
        folder = memory.path
        held = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        room = shutil.disk_usage(folder).free + held
        if room < needed:
            raise ValueError(
                f"checkpoints.memory_every: {training.checkpoints.section.memory_every} was given; "
                f"{AT_A_TIME} copies of this run are {needed / 1e9:.3g} GB, and {folder.parent} "
                f"has room for {room / 1e9:.3g} GB: enlarge it, name another folder in "
                "checkpoints.memory_path, or set memory_every: null"
            )

    first = hosts.hosts.leads(mesh.rank) if hosts else mesh.rank == 0
    on_each(mesh, lambda: check() if first else None)
