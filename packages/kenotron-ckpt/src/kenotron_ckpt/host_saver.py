"""Saves into the memories of several hosts, each of which is sent to the next host, too.

Training waits for all of it, or for a copy of its tensors only: then a thread writes and sends,
over a process group of its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kenotron_ckpt.blocks import Tensors
from kenotron_ckpt.collective_errors import on_all, on_each, on_first
from kenotron_ckpt.committing import commit
from kenotron_ckpt.file_moves import FileMove, move_bytes
from kenotron_ckpt.generation import Generation
from kenotron_ckpt.host_buffer import HostBuffer
from kenotron_ckpt.host_copies import HostCopies
from kenotron_ckpt.index import Manifest
from kenotron_ckpt.retention import remove_checkpoint
from kenotron_ckpt.save_job import failure_of
from kenotron_ckpt.save_report import SaveOutcomes, SaveReport
from kenotron_ckpt.saver import PATIENCE_WITH_RANKS, POOL_BYTES
from kenotron_ckpt.saving import write_share
from kenotron_ckpt.share import FILE_BYTES, WritePlan, check_state, manifest_of, stem_of
from kenotron_ckpt.share_plans import SharePlans
from kenotron_ckpt.snapshot import Snapshot
from kenotron_ckpt.snapshot_files import write_snapshot
from kenotron_ckpt.store import LocalStore
from kenotron_ckpt.threads import set_device
from kenotron_dist import Mesh, background_mesh

Write = Callable[[], dict[str, Any]]
"""Writes the files of this rank; returns ``share_as_json`` of them."""


@dataclass(eq=False)
class _BackgroundSave:
    """A save that a thread makes."""

    store: LocalStore
    begun: float
    waited: float
    blocked: float = 0.0
    durable: float = 0.0
    nbytes: int = 0
    failure: str = ""
    follow_up: str = ""
    snapshot: Snapshot | None = None
    thread: threading.Thread | None = None


class HostSaver:
    """Saves with a copy on the next host. Make and call it on all ranks, in the same order.

    A save that fails is in ``reports``, and the one before it stays. That of a start which a later
    one has superseded is a ValueError on all ranks, at once or at the next call.
    """

    def __init__(
        self,
        copies: HostCopies,
        generation: Generation | None = None,
        *,
        background: bool = False,
        pool_bytes: int = POOL_BYTES,
        pin: bool = True,
        threads: int = 2,
    ) -> None:
        """Prepare saving. Collective over the mesh of the copies.

        Args:
            copies: where the saves go.
            generation: start that saves, on rank 0.
            background: ``save`` returns when the tensors are copied in host memory; else when the
                files are on both hosts.
            pool_bytes, pin, threads: of the background; see ``Saver``.
        """
        self.copies, self.mesh, self._generation = copies, copies.mesh, generation
        self._pool_bytes, self._threads = pool_bytes, threads
        self._pin = pin and self.mesh.device.type != "cpu"
        options = {"pool_bytes": pool_bytes, "threads": threads} if background else {}
        self._plans, self._arena = SharePlans(self.mesh, FILE_BYTES, **options), HostBuffer()
        self._background = background_mesh(self.mesh) if background else None
        self._begin_thread = set_device(self.mesh.device)
        self._outcomes = SaveOutcomes("report")
        self._job: _BackgroundSave | None = None

    def save(
        self, step: int, tensors: Tensors, state: Mapping[str, Any], config_text: str | None = None
    ) -> None:
        """Save, send each file to the next host, and remove earlier steps.

        A save under way is waited for first. In the background tensors must not change before
        ``wait`` has returned, and what cannot be saved is in ``reports``. Arguments and other
        errors are those of ``kenotron_ckpt.save``.
        """
        begun = time.perf_counter()
        self.finish()
        store = LocalStore(self.copies.folder / str(step))
        job = _BackgroundSave(store, begun, waited=time.perf_counter() - begun)
        if self._background is None:
            self._save_now(job, tensors, state, config_text)
        else:
            self._begin(job, self._background, tensors, state, config_text)

    def wait(self) -> None:
        """Return when the saved tensors may change: to be called before every update."""
        job = self._job
        if job is None:
            return
        if job.snapshot is not None:
            job.blocked += job.snapshot.wait()
        if job.thread is not None and not job.thread.is_alive():
            self._hear(job)

    def reports(self) -> list[SaveReport]:
        """Return reports of the saves that were found to have ended since this was last asked."""
        return self._outcomes.take()

    def finish(self) -> None:
        """Return when no save is under way. Raises ValueError for a superseded start."""
        if (job := self._job) is not None and job.thread is not None:
            with self.mesh.pulse.busy("waiting for a copy on the next host"):
                job.thread.join()
            self._hear(job)
        self._outcomes.raise_failure()

    def close(self) -> None:
        """``finish``, and leave the group of the background."""
        self.finish()
        if self._background is not None:
            self._background.close()

    def __enter__(self) -> HostSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._job is not None and self._job.thread is not None:
            self._job.thread.join(PATIENCE_WITH_RANKS)  # the other ranks may be gone

    def _checked(
        self, job: _BackgroundSave, tensors: Tensors, state: Mapping[str, Any]
    ) -> WritePlan:
        check_state(int(job.store.name), state, None)
        return self._plans.plan(tensors)

    def _save_now(
        self, job: _BackgroundSave, tensors: Tensors, state: Mapping[str, Any], config: str | None
    ) -> None:
        plan = on_all(self.mesh, lambda: self._checked(job, tensors, state))
        write = partial(write_share, job.store, stem_of(self.mesh, ""), plan)
        try:
            self._store(self.mesh, job, write, state, config)
        except OSError as error:
            job.failure = str(error)
        job.durable = job.blocked = time.perf_counter() - job.begun
        self._hear(job)

    def _begin(
        self,
        job: _BackgroundSave,
        background: Mesh,
        tensors: Tensors,
        state: Mapping[str, Any],
        config: str | None,
    ) -> None:
        """Take the snapshot, and leave the rest to a thread."""
        urgent, saved = 0, dict[str, Any]()
        try:
            plan = self._checked(job, tensors, state)
            saved, urgent = json.loads(json.dumps(state)), plan.urgent
            self._arena.fit(plan.parts, self._pool_bytes, self._pin)
            job.snapshot = Snapshot(plan.parts, self._arena, self.mesh.device)
            write: Write = partial(
                write_snapshot, job.store, stem_of(self.mesh, ""), plan, job.snapshot,
                threads=self._threads, begin=self._begin_thread,
            )  # fmt: skip
        except Exception as error:  # the other ranks' threads would wait for this one's
            write = partial(_raise, error)

        def run() -> None:
            self._begin_thread()
            job.failure = failure_of(lambda: self._store(background, job, write, saved, config))
            job.durable = time.perf_counter() - job.begun
            if job.snapshot is not None:
                job.snapshot.end()

        job.thread = threading.Thread(target=run, name="host saver", daemon=True)
        job.thread.start()
        if job.snapshot is not None:
            job.snapshot.wait(urgent)
        self._job, job.blocked = job, time.perf_counter() - job.begun

    def _hear(self, job: _BackgroundSave) -> None:
        """Note how a save ended."""
        self._job = None
        self._outcomes.add(
            SaveReport(
                step=int(job.store.name), store=job.store, failure=job.failure, nbytes=job.nbytes,
                blocked=job.blocked, waited=job.waited, durable=job.durable,
                follow_up=job.follow_up,
            )
        )  # fmt: skip

    def _store(
        self,
        mesh: Mesh,
        job: _BackgroundSave,
        write: Write,
        state: Mapping[str, Any],
        config: str | None,
    ) -> None:
        """Store a step on this host and the next one, and remove earlier steps.

        Collective over ``mesh``. Raises ValueError, OSError.
        """
        step, start = int(job.store.name), self._generation
        on_first(mesh, lambda: start.check() if start else None)  # a later one may have this step
        try:
            job.nbytes = self._commit(mesh, job.store, write, state, config)
        except (OSError, ValueError):
            self.copies.remove_step(step, mesh)
            raise
        job.follow_up = self.copies.remove_steps(but=step, mesh=mesh)

    def _commit(
        self,
        mesh: Mesh,
        store: LocalStore,
        write: Write,
        state: Mapping[str, Any],
        config: str | None,
    ) -> int:
        """Write, send and commit; returns the bytes of all files."""
        copies, hosts = self.copies, self.copies.hosts
        # Write own files. A step that is there was never committed, or belongs to an older start.
        on_each(mesh, lambda: _empty(store) if copies.leads else None)
        shares = on_each(mesh, write)
        # Send them to the next host.
        moves = [
            FileMove(rank, hosts.next_rank(rank), name, 0, entry["bytes"])
            for rank, share in enumerate(shares)
            for name, entry in share["files"].items()
        ]
        fault = move_bytes(moves, mesh, store.path, store.path)
        on_each(mesh, lambda: _raise(OSError(fault)) if fault else None)

        # Commit on all hosts; earlier copies are removed when all have.
        what = store, shares, mesh, state, config, self._generation
        found = on_first(mesh, lambda: manifest_of(*what).to_json())
        here = [name for rank in copies.stored_ranks() for name in shares[rank]["files"]]

        def commit_here() -> None:
            commit(store, Manifest.from_json(found), text=found, here=here)

        on_each(mesh, lambda: commit_here() if copies.leads else None)
        return sum(move.nbytes for move in moves)


def _empty(step_folder: LocalStore) -> None:
    """Make a step folder, without the copy that may be in it."""
    remove_checkpoint(step_folder)
    step_folder.make()


def _raise(error: Exception) -> Any:
    raise error
