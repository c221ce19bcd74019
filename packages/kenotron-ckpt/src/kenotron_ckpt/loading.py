"""Loading: any mesh reads what any mesh wrote; the newest checkpoint whose bytes are right."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kenotron_ckpt.checksums import file_faults, manifest_faults
from kenotron_ckpt.cut import Tensors, blocks_of, problems_of
from kenotron_ckpt.folder import (
    LATEST,
    candidates,
    defect,
    manifest_at,
    points_nowhere,
    resolve,
)
from kenotron_ckpt.index import Manifest, Piece
from kenotron_ckpt.reader import THREADS, fill, plan_reads
from kenotron_ckpt.together import on_all, on_each, on_first
from kenotron_dist import Mesh, gather_objects


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load did, the same on every rank (``rank_state`` apart)."""

    folder: Path
    """The step folder that was read."""
    step: int
    """Training steps done when it was saved."""
    state: dict[str, Any]
    """What was saved beside the tensors."""
    rank_state: Any
    """What this rank saved of its own; None when the mesh was another."""
    loaded: list[str]
    """Names of the records that filled a tensor on some rank."""
    missing: list[str]
    """Names that were wanted and are not there; empty unless ``strict`` is False."""
    unused: list[str]
    """Names of the records that no rank wanted."""
    passed_over: list[str]
    """Why each checkpoint that would have been preferred was not read; a sentence each."""


class Checkpoint:
    """A checkpoint that was found and verified, to be read once or several times.

    Made by ``open_checkpoint``.
    """

    def __init__(self, folder: Path, manifest: Manifest, mesh: Mesh) -> None:
        self.folder = folder
        self.manifest = manifest
        self.passed_over: list[str] = []
        """Why each newer or preferred checkpoint was not taken; a sentence each."""
        self._mesh = mesh
        self._verified: set[str] = set()

    def load(self, wanted: Tensors, *, verify: bool = True, strict: bool = True) -> Loaded:
        """Fill tensors in place. Collective over the mesh that opened the checkpoint.

        Arguments:
            wanted: this rank's (local tensor, layout), by any unique key; several may want
                different slices of one record, several ranks the same. Values are cast to the
                tensor's dtype. Padding, which no checkpoint holds, is left untouched.
            verify: compare the checksums of all that is read, unless that was done before.
            strict: False leaves tensors alone whose record is not there, and lists them.

        Raises ValueError on every rank, before any tensor is changed: records that are missing or
        of another global shape (all are listed); tensors that contradict their layouts; nothing
        to load; bytes that are not what was written. OSError when a file cannot be read.
        """
        mesh, manifest = self._mesh, self.manifest
        problems, missing = _union_each(mesh, lambda: _problems(manifest, wanted, mesh, strict))
        self._raise(problems)
        asked = _union(gather_objects(sorted(p.name for _, p in wanted.values()), mesh.world))
        loaded = sorted(set(asked) - set(missing))
        if not loaded:
            raise ValueError(
                f"cannot load {self.folder}: none of the {len(asked)} names that are wanted is "
                f"among its {len(manifest.records)} records"
            )
        if verify:
            self._raise(self.verify(lambda name: name in loaded))
        there = {key: held for key, held in wanted.items() if held[1].name in manifest.records}
        blocks = blocks_of(there, mesh.sizes, mesh.coords)
        reads = on_all(mesh, lambda: plan_reads(manifest.records, blocks))
        on_all(mesh, lambda: fill(self.folder, reads))
        own = manifest.rank_states
        same = dict(manifest.mesh) == dict(mesh.sizes) and len(own) == mesh.world.size
        return Loaded(
            folder=self.folder,
            step=manifest.step,
            state=dict(manifest.state),
            rank_state=own[mesh.rank] if same else None,
            loaded=loaded,
            missing=sorted(missing),
            unused=manifest.unused(loaded),
            passed_over=self.passed_over,
        )

    def verify(self, select: Callable[[str], bool] = lambda _: True) -> list[str]:
        """What is wrong with the bytes of the records whose name ``select`` accepts.

        Collective: every rank reads its share, all get all sentences. What was right is not read
        again.
        """
        names = [n for n in self.manifest.records if select(n) and n not in self._verified]
        own = _share(self.manifest, names, self._mesh)
        faults = _union(on_each(self._mesh, lambda: _faults(self.folder, self.manifest, own)))
        if not faults:
            self._verified.update(names)
        return faults

    def _raise(self, problems: Sequence[str]) -> None:
        if problems:
            raise ValueError("\n  ".join([f"cannot load {self.folder}:", *problems]))


def open_checkpoint(
    path: str | Path,
    mesh: Mesh,
    *,
    select: Callable[[str], bool] = lambda _: True,
    verify: bool = True,
) -> Checkpoint:
    """Find a checkpoint and read its bytes; of a run folder, the first that is whole and right.

    Collective over the mesh. In a run folder the one that ``latest.txt`` names comes first, then
    the others from the newest on; why one was passed over is in ``passed_over``.

    Arguments: a step folder or a run folder; the ranks that call; the names of the records that
    count (``lambda name: not name.startswith("optimizer.")`` for parameters only); whether to
    compare checksums (else only the manifest and the lengths of files).

    Raises ValueError on every rank when there is none; the message has all reasons.
    """
    found = on_first(mesh, lambda: [str(folder) for folder in candidates(path)])
    reasons = on_first(mesh, lambda: _stray(Path(path), found))
    for folder in map(Path, found):
        fault = on_first(mesh, lambda folder=folder: defect(folder))
        faults = [fault] if fault else []
        if not faults:
            manifest = on_all(mesh, lambda folder=folder: manifest_at(folder))
            checkpoint = Checkpoint(folder, manifest, mesh)
            faults = checkpoint.verify(select) if verify else []
            if not faults:
                tried = [*reasons, *on_first(mesh, lambda folder=folder: _newer(folder, found))]
                checkpoint.passed_over = tried
                return checkpoint
        reasons.append(f"{folder}: {'; '.join(faults[:3])}" + _more(faults))
    raise ValueError("\n  ".join([f"no checkpoint at {path} can be read:", *reasons]))


def load(
    path: str | Path, wanted: Tensors, mesh: Mesh, *, verify: bool = True, strict: bool = True
) -> Loaded:
    """Fill tensors in place from a checkpoint that any mesh wrote: open it, and load from it.

    Collective over the mesh. Only what is wanted is verified. See ``open_checkpoint`` and
    ``Checkpoint.load`` for arguments and errors.
    """
    asked = gather_objects(sorted(layout.name for _, layout in wanted.values()), mesh.world)
    names = set(_union(asked))
    checkpoint = open_checkpoint(path, mesh, select=names.__contains__, verify=verify)
    return checkpoint.load(wanted, verify=verify, strict=strict)


def verify_files(path: str | Path) -> list[str]:
    """One sentence for every file, and piece of one, whose bytes are not those that were written.

    Raises ValueError when there is no checkpoint (see ``resolve``). One process reads all.
    """
    step_folder = resolve(path)
    return manifest_faults(step_folder, manifest_at(step_folder))


def _stray(path: Path, found: Sequence[str]) -> list[str]:
    """A sentence when ``latest.txt`` of a run folder names nothing that is there."""
    stray = points_nowhere(path, [Path(folder) for folder in found])
    return [f"{path / LATEST}: it names no step that is here"] if stray else []


def _newer(chosen: Path, found: Sequence[str]) -> list[str]:
    """Why newer checkpoints were not even tried: somebody went back, or a save did not finish."""
    later = [Path(path) for path in found[found.index(str(chosen)) + 1 :]]
    return [
        f"{path}: {defect(path) or 'latest.txt names another'}"
        for path in later
        if int(path.name) > int(chosen.name)
    ]


def _problems(
    manifest: Manifest, wanted: Tensors, mesh: Mesh, strict: bool
) -> tuple[list[str], list[str]]:
    """What forbids the load, and the names that are missing."""
    found = problems_of(wanted, mesh.sizes, mesh.coords)
    missing = []
    for _, layout in wanted.values():
        record = manifest.records.get(layout.name)
        if record is None:
            missing.append(layout.name)
            near = get_close_matches(layout.name, manifest.records, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if strict:
                found.append(f"{layout.name}: no such record among {len(manifest.records)}{hint}")
        elif record.shape != layout.shape:
            found.append(
                f"{layout.name}: the record has shape {list(record.shape)}, the model "
                f"{list(layout.shape)}"
            )
    return found, missing


def _share(manifest: Manifest, names: Sequence[str], mesh: Mesh) -> dict[str, list[Piece]]:
    """The pieces that this rank verifies, by file: about as many bytes on every rank."""
    pieces = [piece for name in names for piece in manifest.records[name].pieces]
    loads = [(0, rank) for rank in range(mesh.world.size)]  # a heap, the least first
    own: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.bytes):
        load, reader = loads[0]
        heapq.heapreplace(loads, (load + piece.bytes + 1, reader))
        if reader == mesh.rank:
            own.setdefault(piece.file, []).append(piece)
    return own


def _faults(folder: Path, manifest: Manifest, own: dict[str, list[Piece]]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [
            pool.submit(file_faults, folder / name, manifest.files[name], pieces[first::THREADS])
            for name, pieces in own.items()
            for first in range(min(THREADS, len(pieces)))
        ]
        return list(dict.fromkeys(fault for job in jobs for fault in job.result()))


def _union_each(
    mesh: Mesh, run: Callable[[], tuple[list[str], list[str]]]
) -> tuple[list[str], list[str]]:
    """Both lists of every rank, each sentence once."""
    first, second = zip(*on_each(mesh, run), strict=True)
    return _union(first), _union(second)


def _union(ranks: Sequence[Sequence[str]]) -> list[str]:
    """What the ranks have, each once."""
    return list(dict.fromkeys(text for texts in ranks for text in texts))


def _more(faults: Sequence[str]) -> str:
    return f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
