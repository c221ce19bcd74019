"""Checkpoints in the memories of several hosts, each with a copy on the next host.

The folder of a host has the files of its own ranks and of those of the host before it, and the
manifest of all files. So each file is on two hosts, and a host that is lost takes none along.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kenotron_ckpt.blocks import Tensors
from kenotron_ckpt.checkpoint import Checkpoint, DamagedCheckpoint
from kenotron_ckpt.collective_errors import on_all, on_each, on_first
from kenotron_ckpt.committing import commit
from kenotron_ckpt.file_moves import FileMove, move_bytes
from kenotron_ckpt.folder import MANIFEST, manifest_text, steps_in
from kenotron_ckpt.generation import Generation
from kenotron_ckpt.host_copy import Fetch, HostCopy
from kenotron_ckpt.hosts import Hosts
from kenotron_ckpt.index import Manifest, seal_of
from kenotron_ckpt.loading import NoCheckpoint
from kenotron_ckpt.report import SaveReport
from kenotron_ckpt.retention import remove_checkpoint
from kenotron_ckpt.saving import write_share
from kenotron_ckpt.share import FILE_BYTES, check_state, manifest_of, plan_share, stem_of
from kenotron_ckpt.store import LocalStore
from kenotron_dist import Mesh, barrier, broadcast_object

T = TypeVar("T")
FETCHED = "fetched"
"""Folder for what is fetched from other hosts while a copy is loaded; the name is no step's."""


class HostCopies:
    """Saves into folders that hosts do not share, and reads from there.

    Make and call it on all ranks, in the same order. All calls but ``reports`` are collective over
    the mesh, and training waits for them.
    """

    def __init__(self, folder: Path, mesh: Mesh, hosts: Hosts) -> None:
        """Take the place of the copies.

        Args:
            folder: path of the folder on every host; it is there.
            mesh: the ranks that save and read.
            hosts: of ``hosts_of``, two or more.
        """
        self.folder, self.mesh, self.hosts = folder, mesh, hosts
        self.generation: Generation | None = None
        """Start that saves, on rank 0."""
        self._leads, self._host = hosts.leads(mesh.rank), hosts.of[mesh.rank]
        self._reports: list[SaveReport] = []

    def stored_ranks(self) -> list[int]:
        """Return the ranks whose files this rank's host has."""
        return [*self.hosts.ranks(self._host), *self.hosts.ranks(self._host - 1)]

    def save(
        self, step: int, tensors: Tensors, state: Mapping[str, Any], config_text: str | None = None
    ) -> None:
        """Save, send each file to the next host, and remove earlier steps.

        Arguments and errors are those of ``kenotron_ckpt.save``, but for an OSError: it is in
        ``reports``, and the earlier copy is still whole.
        """
        begun, nbytes, failure = time.perf_counter(), 0, ""
        step_folder = self.folder / str(step)
        try:
            nbytes = self._save(step_folder, tensors, state, config_text)
        except OSError as error:
            failure = str(error)
        self._remove([step_folder] if failure else self._steps(but=step))
        took = time.perf_counter() - begun
        store = LocalStore(step_folder)
        self._reports.append(
            SaveReport(
                step=step, store=store, failure=failure, nbytes=nbytes, blocked=took, durable=took
            )
        )

    def reports(self) -> list[SaveReport]:
        """Return reports of the saves since this was last asked."""
        found, self._reports = self._reports, []
        return found

    def newest(self) -> tuple[tuple[int, int] | None, str]:
        """Return generation and step of the newest whole copy, and a remark on later ones."""
        partial: list[str] = []
        for each in self._found():
            if each.is_whole:
                return (each.generation, each.step), "".join(partial)
            partial.append(f"; passed over {each}")
        return None, "".join(partial)

    def read(self, read: Callable[[Checkpoint], T]) -> T:
        """Call ``read`` with the newest whole copy, and the next one where it is damaged.

        What a rank reads of files of other hosts is fetched from there. See ``read_preferred``,
        also for the NoCheckpoint that this raises.
        """
        reasons: list[str] = []
        for each in self._found():
            try:
                if each.is_whole:
                    result = self._read(each, read, reasons)
                    self._remove([], self.folder / FETCHED)
                    return result
                reasons.append(str(each))
            except DamagedCheckpoint as error:
                reasons.append(str(error))
        self._remove([], self.folder / FETCHED)
        raise NoCheckpoint("\n  ".join([f"no copy in {self.folder} can be read:", *reasons]))

    def remove_steps(self) -> None:
        """Remove all copies."""
        self._remove(self._steps())

    def remove(self) -> None:
        """Remove the folder on every host."""
        self._remove(self._steps(), self.folder)

    def _remove(self, steps: Iterable[Path], folder: Path | None = None) -> None:
        """Remove copies, then a folder, when no rank reads them.

        No rank continues before they are gone.
        """
        barrier(self.mesh.world)
        if self._leads:
            for each in steps:
                with contextlib.suppress(OSError):
                    remove_checkpoint(LocalStore(each))
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        barrier(self.mesh.world)

    def _steps(self, but: int | None = None) -> list[Path]:
        return [self.folder / str(step) for step in steps_in(self.folder) if step != but]

    def _save(
        self, step_folder: Path, tensors: Tensors, state: Mapping[str, Any], config: str | None
    ) -> int:
        """Save; returns the bytes of all files."""
        mesh, hosts, store = self.mesh, self.hosts, LocalStore(step_folder)
        # Write own files. A step that is there was never committed, or belongs to an older start.
        on_each(mesh, lambda: check_state(int(store.name), state, None))
        plan = on_all(mesh, lambda: plan_share(tensors, mesh, FILE_BYTES))
        on_each(mesh, lambda: _empty(store) if self._leads else None)
        shares = on_each(mesh, lambda: write_share(store, stem_of(mesh, ""), plan))
        # Send them to the next host.
        moves = [
            FileMove(rank, hosts.next_rank(rank), name, 0, entry["bytes"])
            for rank, share in enumerate(shares)
            for name, entry in share["files"].items()
        ]
        fault = move_bytes(moves, mesh, step_folder, step_folder)
        on_each(mesh, lambda: _raise(fault))

        # Commit on all hosts; earlier copies are removed when all have.
        what = store, shares, mesh, state, config, self.generation
        found = on_first(mesh, lambda: manifest_of(*what).to_json())
        here = [name for rank in self.stored_ranks() for name in shares[rank]["files"]]

        def commit_here() -> None:
            commit(store, Manifest.from_json(found), text=found, here=here)

        on_each(mesh, lambda: commit_here() if self._leads else None)
        return sum(move.nbytes for move in moves)

    def _found(self) -> list[HostCopy]:
        """Find the copies of all hosts, the latest start and step first."""
        entries = on_each(self.mesh, lambda: self._listed() if self._leads else [])
        copies: dict[tuple[int, int, str], HostCopy] = {}
        for rank, listed in enumerate(entries):
            for generation, step, seal, files, there in listed:
                key = generation, step, seal
                copy = copies.setdefault(key, HostCopy(*key, files))
                for place in there:
                    copy.holders.setdefault(place, set()).add(self.hosts.of[rank])
        return [copies[key] for key in sorted(copies, reverse=True)]

    def _listed(self) -> list[tuple[int, int, str, int, list[int]]]:
        """List what this host has: fields of a ``HostCopy``, and the places of its files."""
        listed = []
        for path in self._steps():
            store = LocalStore(path)
            try:
                text = manifest_text(store)
                manifest, there = Manifest.from_json(text), store.listing()
            except (OSError, ValueError):
                continue
            if manifest.step == int(path.name):
                files = enumerate(manifest.files.items())
                own = [n for n, (name, entry) in files if there.get(name) == entry.bytes]
                key = manifest.generation, manifest.step, seal_of(text)
                listed.append((*key, len(manifest.files), own))
        return listed

    def _read(self, copy: HostCopy, read: Callable[[Checkpoint], T], reasons: list[str]) -> T:
        """Read a whole copy. Raises DamagedCheckpoint."""
        mesh, path = self.mesh, self.folder / str(copy.step)
        ranks = range(mesh.world.size)
        has_it = {host for holders in copy.holders.values() for host in holders}
        source = next(rank for rank in ranks if self.hosts.of[rank] in has_it)
        text = broadcast_object(
            manifest_text(LocalStore(path)) if mesh.rank == source else "", mesh.world, source
        )
        manifest = Manifest.from_json(text)
        target = self.folder / FETCHED / path.name
        own = {n for n, holders in copy.holders.items() if self._host in holders}

        def prepare() -> None:
            shutil.rmtree(target.parent, ignore_errors=True)
            target.mkdir(parents=True)
            for number, (name, entry) in enumerate(manifest.files.items()):
                if number in own:
                    os.link(path / name, target / name)
                else:  # without blocks, until bytes are fetched
                    with (target / name).open("wb") as file:
                        file.truncate(entry.bytes)
            (target / MANIFEST).write_text(text)

        on_each(mesh, lambda: prepare() if self._leads else None)
        fetch = Fetch(copy, manifest, mesh, self.hosts, path, target)
        checkpoint = Checkpoint(LocalStore(target), manifest, mesh, fetch)
        checkpoint.passed_over = reasons
        return read(checkpoint)


def _empty(step_folder: LocalStore) -> None:
    """Make a step folder, without the copy that may be in it."""
    remove_checkpoint(step_folder)
    step_folder.make()


def _raise(fault: str) -> None:
    if fault:
        raise OSError(fault)
