"""One save in the background: the part of this rank's thread, during training.

The ranks' threads agree through notes: rank 0 makes the folder, all write, rank 0 commits and says
how it went. None of them ever takes part in a collective.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kenotron_ckpt.generation import Generation
from kenotron_ckpt.preparing import prepare
from kenotron_ckpt.save_report import SaveReport
from kenotron_ckpt.saving import discard
from kenotron_ckpt.share import WritePlan, commit_shares, stem_of
from kenotron_ckpt.snapshot import Snapshot
from kenotron_ckpt.snapshot_files import write_snapshot
from kenotron_ckpt.store import Store
from kenotron_ckpt.threads import set_device
from kenotron_dist import Mesh, MessageRefused, StoreMessages

_SAID = "said"
_FAILED = "failed"


@dataclass(eq=False)
class SaveJob:
    """A save under way: what it needs, and at its end how it went."""

    number: int
    """Sequence number of this save; part of the key of its store messages."""
    step_folder: Store
    mesh: Mesh
    notes: StoreMessages
    plan: WritePlan
    snapshot: Snapshot
    state: Mapping[str, Any]
    rank_state: Any
    config_text: str | None
    threads: int
    verify: bool
    after: Callable[[Store], tuple[Sequence[int], str]]
    """Called on rank 0 once the checkpoint stands; returns ``removed`` and ``trouble``."""
    generation: Generation | None = None
    """Start that saves, on rank 0."""
    begin_thread: Callable[[], None] = lambda: None
    """Called first by every thread that writes (``set_device``)."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the other ranks are no longer waited for."""
    begun: float = field(default_factory=time.perf_counter)
    done: threading.Event = field(default_factory=threading.Event)
    failure: str = ""
    """Reason why there is no checkpoint; the same on all ranks."""
    total: int = 0
    """Bytes that all ranks have written."""
    written: float = 0.0
    """Seconds until this rank's share was on the disk."""
    durable: float = 0.0
    """Seconds until the checkpoint stood."""
    removed: Sequence[int] = ()
    trouble: str = ""
    """Problem after the commit, on rank 0."""

    def run(self) -> None:
        """Do it all; never raises."""
        try:
            self._protocol()
        except BaseException as error:  # a store that is gone, mostly; a thread has no caller
            self.failure = _words(error)
        self.snapshot.end()
        self.done.set()

    def report(self, blocked: float, waited: float, slow_down: float | None) -> SaveReport:
        """Return the report of a save that is done; its numbers are those of ``SaveReport``."""
        return SaveReport(
            step=int(self.step_folder.name),
            store=self.step_folder,
            failure=self.failure,
            nbytes=self.total,
            blocked=blocked,
            waited=waited,
            durable=self.durable,
            slow_down=slow_down,
            removed=self.removed,
            follow_up=self.trouble,
        )

    def _protocol(self) -> None:
        notes, rank = self.notes, self.mesh.rank
        if rank == 0:
            self._post("folder", lambda: prepare(self.step_folder))
        tag, failure = self._hear("folder")
        # A rank with nothing to write reports, too: so rank 0 knows that all ranks have begun.
        self._post(f"share/{rank}", lambda: self._write(tag, failure))
        self.written = time.perf_counter() - self.begun
        self.snapshot.end()
        if rank == 0:
            self._post("outcome", lambda: self._commit(failure))
        outcome, self.failure = self._hear("outcome")
        self.durable = time.perf_counter() - self.begun
        if not self.failure:
            self.total = outcome
            if rank == 0:
                self.removed, self.trouble = self.after(self.step_folder)
        notes.erase(f"{self.number}/share/{rank}")

    def _write(self, tag: str, failure: str) -> dict[str, Any]:
        """Write this rank's parts with all threads; its report to rank 0.

        Raises RuntimeError with ``failure``, if any: there is no folder to write to.
        """
        if failure:
            raise RuntimeError(failure)
        how = {"threads": self.threads, "verify": self.verify, "begin": self.begin_thread}
        stem = stem_of(self.mesh, tag)
        return write_snapshot(
            self.step_folder, stem, self.plan, self.snapshot, self.rank_state, **how
        )

    def _commit(self, failure: str) -> int:
        """On rank 0: collect all reports and commit the checkpoint; returns its bytes.

        Raises RuntimeError when some rank has failed: nothing is left then.
        """
        world = self.mesh.world.size
        try:
            heard = [self._hear(f"share/{rank}") for rank in range(world)]
            if not self.cancelled.is_set():  # all have begun this save, and heard the last one's
                for old in ("folder", "outcome"):
                    self.notes.erase(f"{self.number - 1}/{old}")
            faults = [f"rank {r}: {fault}" for r, (_, fault) in enumerate(heard) if fault]
            if failure or faults:
                raise RuntimeError(failure or "\n".join(faults))
            shares = [share for share, _ in heard]
            what = (self.step_folder, shares, self.mesh, self.state, self.config_text)
            commit_shares(*what, self.verify, self.generation)
        except Exception:
            discard(self.step_folder)
            raise
        return sum(entry["bytes"] for share in shares for entry in share["files"].values())

    def _post(self, key: str, run: Callable[[], Any]) -> None:
        """Do something and leave a note of what came of it, or of why it failed."""
        try:
            note = {_SAID: run()}
        except BaseException as error:
            note = {_FAILED: _words(error)}
        self.notes.post(f"{self.number}/{key}", note)

    def _hear(self, key: str) -> tuple[Any, str]:
        """Result of a rank's step, or why it failed: one of the two."""
        try:
            note = self.notes.wait(f"{self.number}/{key}", self.cancelled.is_set)
        except MessageRefused as error:  # reported: peers that wait for this rank learn of it
            return None, str(error)
        if note is None:
            return None, f"the wait for {key} was given up: was a rank lost?"
        return note.get(_SAID), note.get(_FAILED, "")


class JobThread:
    """The thread that runs saves, one after the other, and the messages to those of other ranks.

    Make it on all ranks of ``mesh``, in the same order.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.notes = StoreMessages(mesh, "save")
        self.begin = set_device(mesh.device)
        """Called first by every thread that writes."""
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        arguments = (self._jobs, self.begin)
        self._thread = threading.Thread(target=_work, args=arguments, name="saver", daemon=True)
        self._thread.start()

    def run(self, job: SaveJob) -> None:
        """Run a save when those before are done."""
        self._jobs.put(job)

    def end(self, wait: bool) -> None:
        """Run no save after those that were given; ``wait`` until the thread has released them."""
        self._jobs.put(None)
        if wait:
            self._thread.join()


def _work(jobs: queue.SimpleQueue[SaveJob | None], begin: Callable[[], None]) -> None:
    begin()
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it keeps the snapshot and the tensors that were saved


def failure_of(run: Callable[[], object]) -> str:
    """Do something; why it failed, or nothing. What comes after a commit does not unmake it."""
    try:
        run()
    except BaseException as error:
        return _words(error)
    return ""


def decline(notes: StoreMessages, number: int, rank: int, error: Exception) -> None:
    """Say that this rank takes no part in a save: the others would wait for what it writes."""
    notes.post(f"{number}/share/{rank}", {_FAILED: _words(error)})
    if rank == 0:
        for key in ("folder", "outcome"):
            notes.post(f"{number}/{key}", {_FAILED: f"rank 0: {_words(error)}"})


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError | ValueError | RuntimeError) else repr(error)
