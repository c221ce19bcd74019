"""Saving a run: a snapshot at once and files during the next steps, or all in the call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kenotron_ckpt.blocks import Tensors
from kenotron_ckpt.collective_errors import on_all, on_first
from kenotron_ckpt.generation import Generation
from kenotron_ckpt.host_buffer import HostBuffer
from kenotron_ckpt.lock import FolderLock
from kenotron_ckpt.retention import check_kept, prune
from kenotron_ckpt.save_job import JobThread, SaveJob, decline, failure_of
from kenotron_ckpt.save_report import Pace, SaveOutcomes, SaveReport
from kenotron_ckpt.saving import save_and_report
from kenotron_ckpt.share import FILE_BYTES, WritePlan, check_positive, check_state
from kenotron_ckpt.share_plans import SharePlans
from kenotron_ckpt.snapshot import Snapshot
from kenotron_ckpt.store import LocalStore, Location, Store, local_path, store_at
from kenotron_dist import Handle, Mesh

POOL_BYTES = 16 << 30
"""Host memory that the snapshot of a rank may take by default."""
PATIENCE_WITH_RANKS = 20.0
"""Seconds for which a run that ends with an error waits for a save under way."""


class Saver:
    """Saves to one run folder while training continues.

    Make and call it on all ranks, in the same order. A ``with`` statement ends with ``close``.

    Args:
        folder: a URL, a store, or a path that all nodes share; locked until ``close``.
        mesh: the ranks that save.
        background: False: ``save`` returns when the checkpoint stands, is collective over the mesh,
            and copies one block at a time to the host: no pool, no threads.
        every: ``maybe_save`` saves at multiples of this many steps; None: never by itself.
        keep, keep_every: which old checkpoints stay (``prune``); None keeps all.
        pool_bytes: host memory for the snapshot, on each rank. What does not fit is copied as
            files reach the disk; ``wait`` then waits for the disk.
        pin: page-locked memory, so that an accelerator copies while it computes.
        threads: so many files are written at a time.
        file_bytes: no file of a rank has more data.
        verify: read every file back from the disk before the commit.
        on_failure: ``"warn"``: a save that failed is a warning, and training continues;
            ``"report"``: it is only in ``reports()``; ``"raise"``: it is a SaveFailed, on all ranks
            at the next save, or at ``close`` (in one process at the next call).
        on_commit: called on rank 0, in the thread that writes, with each checkpoint that stands;
            what it raises is in the report.
        busy: ``prune`` spares step folders for which it returns True.
        generation: of another folder's Saver, where this one has copies of its saves.
        above: of a start whose checkpoints are elsewhere: the number of this one is higher.

    A save by a start that a later one has superseded is refused, whatever ``on_failure`` is: a
    ValueError at the next save or at ``close``.

    Raises:
        ValueError: on all ranks; a number makes no sense, or another run writes to the folder.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Location,
        mesh: Mesh,
        *,
        background: bool = True,
        every: int | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        pool_bytes: int = POOL_BYTES,
        pin: bool = True,
        threads: int = 2,
        file_bytes: int = FILE_BYTES,
        verify: bool = False,
        on_failure: str = "warn",
        on_commit: Callable[[Store], None] = lambda _: None,
        busy: Callable[[Store], bool] = lambda _: False,
        generation: Generation | None = None,
        above: int = 0,
    ) -> None:
        check_positive(every=every, pool_bytes=pool_bytes, threads=threads, file_bytes=file_bytes)
        check_kept(keep, keep_every)
        self.store, self.mesh, self.every = on_all(mesh, lambda: store_at(folder)), mesh, every
        self._keep, self._keep_every, self._busy = keep, keep_every, busy
        self._threads, self._verify = threads, verify
        self._pool_bytes, self._file_bytes = pool_bytes, file_bytes
        self._pin = pin and mesh.device.type != "cpu"
        self._outcomes, self._on_commit = SaveOutcomes(on_failure), on_commit
        self._arena, self._pace = HostBuffer(), Pace()
        self._plans = SharePlans(mesh, file_bytes, pool_bytes=pool_bytes, threads=threads)
        self._job: SaveJob | None = None
        self._count, self._closed = 0, False
        self._blocked = self._waited = 0.0
        self._lock: FolderLock | None = None
        self.generation = generation
        """Start that saves: the next one of the folder. None on ranks but the first, and where a
        store has no lock."""
        on_first(mesh, lambda: self._take_lock(above))
        self._thread = JobThread(mesh) if background else None

    @property
    def folder(self) -> Path:
        """The local run folder. Raises ValueError when it is in a remote store."""
        return local_path(self.store)

    def due(self, step: int) -> bool:
        """Return True where ``maybe_save`` would save after this step."""
        return self.every is not None and step % self.every == 0

    def maybe_save(self, step: int, *arguments: Any, **options: Any) -> bool:
        """``save`` if the step is due; whether it was."""
        if self.due(step):
            self.save(step, *arguments, **options)
        return self.due(step)

    def reserve(self, tensors: Tensors, volatile: Collection[str] = ()) -> None:
        """Finish a save under way, then take the memory: the first save is as fast as others."""
        self.finish()
        if self._thread is not None:
            self._arena.fit(self._plans.plan(tensors, volatile).parts, self._pool_bytes, self._pin)

    def save(
        self,
        step: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        config_text: str | None = None,
        *,
        rank_state: Any = None,
        volatile: Collection[str] = (),
        pending: Sequence[Handle] = (),
    ) -> None:
        """Begin to save; without ``background``, save. Returns when training may continue.

        The tensors may be used, but in the background must not change before ``wait`` has returned;
        those that ``volatile`` names, and all else, may change at once. An earlier save that is
        still being written is waited for.

        Args:
            step, tensors, state, config_text, rank_state: see ``kenotron_ckpt.save``.
            volatile: keys of tensors that change before the next ``wait``, such as buffers.
            pending: transfers under way into the tensors, which are waited for first.

        Raises:
            ValueError: an argument cannot be saved (on the ranks that have it: on the others the
                save fails; without ``background`` on all).
            SaveFailed: see the class.
            RuntimeError: after ``close``.
        """
        begun = time.perf_counter()
        if self._closed:
            raise RuntimeError(f"save of step {step}: this Saver of {self.store} is closed")
        if self._thread is None:
            for handle in pending:
                handle.wait()
            what = (self.store, step, tensors, self.mesh, state, config_text)
            report = save_and_report(
                *what, self._follow_up, begun, rank_state, file_bytes=self._file_bytes,
                verify=self._verify, generation=self.generation,
            )  # fmt: skip
            self._outcomes.add(report)
            self._outcomes.raise_failure()
            return
        self.finish()
        waited = time.perf_counter() - begun
        self._count += 1
        try:
            for handle in pending:
                handle.wait()
            check_state(step, state, rank_state)
            plan = self._plans.plan(tensors, volatile)
            self._begin(self._thread, step, plan, state, config_text, rank_state)
        except Exception as error:
            decline(self._thread.notes, self._count, self.mesh.rank, error)
            raise
        self._blocked, self._waited = time.perf_counter() - begun, waited
        self._pace.begin(self._blocked)

    def wait(self) -> None:
        """Return when the saved tensors may change: to be called before every update."""
        saving = self._job is not None
        if self._job is not None:
            self._blocked += self._job.snapshot.wait()
        self._pace.step(saving)
        if self._job is not None and self._job.done.is_set():
            self._hear(self._job)
        if self.mesh.world.size == 1:  # several ranks raise together, at the next save
            self._outcomes.raise_failure()

    def reports(self) -> list[SaveReport]:
        """Saves that were found to have ended since this was last asked."""
        return self._outcomes.take()

    def finish(self) -> None:
        """Return when no save is under way. Raises SaveFailed (see the class)."""
        if self._job is not None:
            with self.mesh.pulse.busy("waiting for a checkpoint to be written"):
                self._job.done.wait()
            self._hear(self._job)
        self._outcomes.raise_failure()

    def close(self) -> None:
        """``finish``, and let others write to the folder. Harmless when done before."""
        try:
            self.finish()
        finally:
            self._leave()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        job = self._job  # the other ranks may be gone: a save under way gets a little time
        if job is not None and not job.done.wait(PATIENCE_WITH_RANKS):
            job.cancelled.set()
        self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._arena = HostBuffer()  # a cancelled save has what it needs of it
        self._plans.forget()
        # The memory is free when this returns, but for a save whose other ranks may be gone.
        if self._thread is not None:
            self._thread.end(wait=self._job is None or self._job.done.is_set())
        if self._lock is not None:
            self._lock.release()

    def _take_lock(self, above: int) -> None:
        if isinstance(self.store, LocalStore):
            with self.mesh.pulse.busy("taking the run folder"):
                self._lock = FolderLock(self.store.path, above)
            self.generation = self.generation or self._lock.generation

    def _begin(
        self,
        thread: JobThread,
        step: int,
        plan: WritePlan,
        state: Mapping[str, Any],
        config: str | None,
        rank_state: Any,
    ) -> None:
        """Take the snapshot, and leave the rest to the thread."""
        begun = time.perf_counter()
        self._arena.fit(plan.parts, self._pool_bytes, self._pin)
        self._job = SaveJob(
            number=self._count,
            step_folder=self.store.at(str(step)),
            mesh=self.mesh,
            notes=thread.notes,
            plan=plan,
            snapshot=Snapshot(plan.parts, self._arena, self.mesh.device),
            state=json.loads(json.dumps(state)),  # a copy: the caller may change its own
            rank_state=json.loads(json.dumps(rank_state)),
            config_text=config,
            threads=self._threads,
            verify=self._verify,
            generation=self.generation,
            after=self._follow_up,
            begin_thread=thread.begin,
            begun=begun,
        )
        thread.run(self._job)
        self._job.snapshot.wait(plan.urgent)

    def _hear(self, job: SaveJob) -> None:
        """Note how the save under way ended."""
        self._job = None
        self._outcomes.add(job.report(self._blocked, self._waited, self._pace.slow_down()))

    def _follow_up(self, step_folder: Store) -> tuple[list[int], str]:
        """On rank 0, after a commit: tell who asked, remove old ones; their steps, and troubles."""
        keep, removed = self._keep, []
        trouble = failure_of(lambda: self._on_commit(step_folder))
        if keep is not None:
            options = {"keep_every": self._keep_every, "busy": self._busy}
            then = failure_of(lambda: removed.extend(prune(self.store, keep, **options)))
            trouble = "\n".join(filter(None, (trouble, then)))
        return removed, trouble
