"""Checkpoints in the memories of several hosts, each with a copy on the next host.

The folder of a host has the files of its own ranks and of those of the host before it, and the
manifest of all files. So each file is on two hosts, and a host that is lost takes none along.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from kenotron_ckpt.checkpoint import Checkpoint, DamagedCheckpoint
from kenotron_ckpt.collective_errors import on_each
from kenotron_ckpt.folder import MANIFEST, manifest_text, steps_in
from kenotron_ckpt.host_copy import Fetch, HostCopy
from kenotron_ckpt.hosts import Hosts
from kenotron_ckpt.index import Manifest, seal_of
from kenotron_ckpt.loading import NoCheckpoint
from kenotron_ckpt.retention import remove_each
from kenotron_ckpt.store import LocalStore
from kenotron_dist import Mesh, barrier, broadcast_object

T = TypeVar("T")
FETCHED = "fetched"
"""Folder for what is fetched from other hosts while a copy is loaded; the name is no step's."""


class HostCopies:
    """Saves in folders that hosts do not share: reads and removes them; ``HostSaver`` makes them.

    Make and call it on all ranks, in the same order. All calls are collective over the mesh.
    """

    def __init__(self, folder: Path, mesh: Mesh, hosts: Hosts) -> None:
        """Take the place of the copies.

        Args:
            folder: path of the folder on every host; it is there.
            mesh: the ranks that save and read.
            hosts: of ``hosts_of``, two or more.
        """
        self.folder, self.mesh, self.hosts = folder, mesh, hosts
        self.leads = hosts.leads(mesh.rank)
        """True on one rank of each host."""
        self._host = hosts.of[mesh.rank]

    def stored_ranks(self) -> list[int]:
        """Return the ranks whose files this rank's host has."""
        return [*self.hosts.ranks(self._host), *self.hosts.ranks(self._host - 1)]

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

    def remove_steps(self, but: int | None = None, mesh: Mesh | None = None) -> str:
        """Remove the copies of all steps but one, when no rank reads them.

        ``mesh``: that of the thread that calls; None: its own. No rank continues before they are
        gone. Returns why some could not be removed, on all ranks; empty: all were.
        """
        return self._remove([step for step in steps_in(self.folder) if step != but], mesh=mesh)

    def remove_step(self, step: int, mesh: Mesh | None = None) -> str:
        """Remove the copy of one step; see ``remove_steps``."""
        return self._remove([step], mesh=mesh)

    def remove(self) -> None:
        """Remove the folder on every host."""
        self._remove(steps_in(self.folder), self.folder)

    def _remove(
        self, steps: Iterable[int], folder: Path | None = None, mesh: Mesh | None = None
    ) -> str:
        """Remove copies, then a folder; see ``remove_steps``."""
        mesh = mesh or self.mesh

        def remove() -> str:
            fault = remove_each(LocalStore(self.folder / str(step)) for step in steps)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            return fault

        barrier(mesh.world)
        found = on_each(mesh, lambda: remove() if self.leads else "")
        return "; ".join(f"rank {rank}: {fault}" for rank, fault in enumerate(found) if fault)

    def _found(self) -> list[HostCopy]:
        """Find the copies of all hosts, the latest start and step first."""
        entries = on_each(self.mesh, lambda: self._listed() if self.leads else [])
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
        for path in (self.folder / str(step) for step in steps_in(self.folder)):
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

        on_each(mesh, lambda: prepare() if self.leads else None)
        fetch = Fetch(copy, manifest, mesh, self.hosts, path, target)
        checkpoint = Checkpoint(LocalStore(target), manifest, mesh, fetch)
        checkpoint.passed_over = reasons
        return read(checkpoint)
