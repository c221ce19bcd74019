"""A checkpoint that was found: its bytes verified, its values read into tensors of any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kenotron_ckpt.blocks import Tensors, blocks_of, problems_of
from kenotron_ckpt.byte_checks import faults_in, share_of_bytes, wanted_bytes
from kenotron_ckpt.collective_errors import on_all, on_each
from kenotron_ckpt.index import Manifest, Piece
from kenotron_ckpt.manifest_rules import is_floating
from kenotron_ckpt.reader import Read, fill, fill_verified, invalidate, plan_reads
from kenotron_ckpt.share import sizes_of
from kenotron_ckpt.store import Store, local_path
from kenotron_dist import Mesh

_HINTS = 5
"""Missing names that get a suggestion: each is compared with all that are there."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Result of a load, the same on every rank (``rank_state`` apart)."""

    store: Store
    """The step folder that was read."""
    step: int
    """Training steps done when it was saved."""
    state: dict[str, Any]
    """State that was saved next to the tensors."""
    rank_state: Any
    """State that this rank saved of its own; None when the mesh was another."""
    loaded: list[str]
    """Names of the records that filled a tensor on some rank."""
    missing: list[str]
    """Names that were wanted and are not there; empty unless ``strict`` is False."""
    unused: list[str]
    """Names of the records that no rank wanted."""
    passed_over: list[str]
    """Reason why each checkpoint that would have been preferred was not read; a sentence each."""


class DamagedCheckpoint(ValueError):
    """Bytes of a checkpoint are not those that were written. Raised on every rank."""

    def __init__(self, store: Store, faults: Sequence[str], filled: bool) -> None:
        self.faults = list(faults)
        """A sentence for every fault."""
        self.filled = filled
        """True where tensors were filled already; those of floating-point numbers are NaN then."""
        lines = [f"cannot load {store}:", *faults]
        if filled:
            lines.append("the tensors were set to NaN: load another checkpoint into them")
        super().__init__("\n  ".join(lines))


class Checkpoint:
    """A checkpoint that was found, to be read once or several times.

    Made by ``open_checkpoint``, and by ``read_preferred``.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        mesh: Mesh,
        fetch: Callable[[Iterable[Piece]], str] | None = None,
    ) -> None:
        """Take a checkpoint that was found.

        Args:
            store: the step folder.
            manifest: its manifest.
            mesh: the ranks that read.
            fetch: called on all ranks, with the pieces that each is about to read; it may be
                collective, and returns what failed. None: all are in the store.
        """
        self.store = store
        """The step folder."""
        self.manifest = manifest
        self.passed_over: list[str] = []
        """Reason why each newer or preferred checkpoint was not taken; a sentence each."""
        self._mesh, self._fetch = mesh, fetch
        self._verified: set[str] = set()

    @property
    def folder(self) -> Path:
        """The local step folder. Raises ValueError when it is in a remote store."""
        return local_path(self.store)

    def load(self, wanted: Tensors, *, verify: bool = True, strict: bool = True) -> Loaded:
        """Fill tensors in place. Collective over the mesh that opened the checkpoint.

        Bytes that were not verified before are hashed while they fill their tensor. A piece that
        no rank reads whole is verified before, by one rank.

        Args:
            wanted: this rank's (local tensor, layout), by any unique key; several may want
                different slices of one record, several ranks the same. Values are cast to the
                tensor's dtype. Padding, which no checkpoint holds, is left untouched.
            verify: compare the checksums of all that is read, unless that was done before.
            strict: False leaves tensors alone whose record is not there, and lists them. All
                bytes are then verified before any tensor is changed, which reads them twice.

        Raises:
            ValueError: on every rank, before any tensor is changed: records that are missing or
                of another global shape, or whole numbers for floating point (all are listed);
                tensors that contradict their layouts; nothing to load.
            DamagedCheckpoint: on every rank: bytes are not those that were written, or a file
                cannot be read. Where ``filled`` is True, all floating-point values that this call
                had to fill are NaN, on every rank, and other numbers may be damaged: a program
                that ignores the error does not compute with them unnoticed. To keep tensors as
                they are, call ``verify`` first, or open the checkpoint with
                ``open_checkpoint(verify=True)``.
            OSError: without ``verify``, when a file cannot be read.
        """
        mesh, manifest = self._mesh, self.manifest
        # All ranks learn of every problem here, before any of them changes a tensor.
        problems, missing = _union_each(mesh, lambda: _problems(manifest, wanted, mesh, strict))
        if problems:
            raise ValueError("\n  ".join([f"cannot load {self.store}:", *problems]))
        there = {key: held for key, held in wanted.items() if held[1].name in manifest.records}
        blocks = blocks_of(there, mesh.view)
        reads = on_all(mesh, lambda: plan_reads(manifest.records, blocks))
        names = {layout.name for _, layout in there.values()}
        loaded, rest = wanted_bytes(manifest, names, reads, mesh)
        if not loaded:
            raise ValueError(
                f"cannot load {self.store}: none of the {len(missing)} names that are wanted is "
                f"among its {len(manifest.records)} records"
            )
        # Not strict: the caller keeps some tensors, so damage must be found before any is filled.
        if verify and not strict:
            self._raise(self.verify(set(loaded).__contains__))
        self._fetched(read.piece for read in reads)
        # Otherwise bytes are read once: they are hashed while they fill their tensors.
        if verify and not self._verified.issuperset(loaded):
            self._fill_verified(reads, rest)
            self._verified.update(loaded)
        else:
            on_all(mesh, lambda: fill(self.store, reads))
        return self._result(loaded, missing)

    def verify(self, select: Callable[[str], bool] = lambda _: True) -> list[str]:
        """List what is wrong with the bytes of the records whose name ``select`` accepts.

        Collective: every rank reads its share, all get all sentences. What was right is not read
        again.
        """
        names = [n for n in self.manifest.records if select(n) and n not in self._verified]
        faults = self._faults([p for name in names for p in self.manifest.records[name].pieces])
        if not faults:
            self._verified.update(names)
        return faults

    def _faults(self, pieces: Sequence[Piece]) -> list[str]:
        """Faults of pieces that are the same on all ranks; every rank reads its share."""
        own = share_of_bytes(pieces, self._mesh)
        self._fetched(piece for pieces in own.values() for piece in pieces)
        return _union(on_each(self._mesh, lambda: faults_in(self.store, self.manifest, own)))

    def _fill_verified(self, reads: Sequence[Read], rest: Sequence[Piece]) -> None:
        """Verify what no rank reads whole, then fill and hash the others as they arrive."""
        if rest:
            self._raise(self._faults(rest))
        files = self.manifest.files
        found = on_each(self._mesh, lambda: fill_verified(self.store, reads, files))
        if any(found):
            invalidate(reads)
        self._raise(_union(found), filled=True)

    def _fetched(self, pieces: Iterable[Piece]) -> None:
        """Have pieces in the store. Raises DamagedCheckpoint where a rank cannot."""
        if self._fetch is None:
            return
        fault = self._fetch(pieces)
        self._raise(_union(on_each(self._mesh, lambda: [fault] if fault else [])))

    def _raise(self, faults: Sequence[str], filled: bool = False) -> None:
        if faults:
            raise DamagedCheckpoint(self.store, faults, filled)

    def _result(self, loaded: list[str], missing: Sequence[str]) -> Loaded:
        mesh, manifest = self._mesh, self.manifest
        own = manifest.rank_states
        same = dict(manifest.mesh) == sizes_of(mesh) and len(own) == mesh.world.size
        return Loaded(
            store=self.store,
            step=manifest.step,
            state=dict(manifest.state),
            rank_state=own[mesh.rank] if same else None,
            loaded=loaded,
            missing=sorted(missing),
            unused=manifest.unused(loaded),
            passed_over=self.passed_over,
        )


def _problems(
    manifest: Manifest, wanted: Tensors, mesh: Mesh, strict: bool
) -> tuple[list[str], list[str]]:
    """Return the problems that forbid the load, and the names that are missing."""
    found = problems_of(wanted, mesh.view)
    missing = []
    for tensor, layout in wanted.values():
        record = manifest.records.get(layout.name)
        if record is None:
            missing.append(layout.name)
            close = strict and len(missing) <= _HINTS
            near = get_close_matches(layout.name, manifest.records, n=1) if close else []
            hint = f"; did you mean {near[0]}?" if near else ""
            if strict:
                found.append(f"{layout.name}: no such record among {len(manifest.records)}{hint}")
        elif record.shape != layout.shape:
            found.append(
                f"{layout.name}: the record has shape {list(record.shape)}, the model "
                f"{list(layout.shape)}"
            )
        elif is_floating(record.dtype) != tensor.dtype.is_floating_point:
            found.append(
                f"{layout.name}: the record is of {record.dtype}, the model of "
                f"{str(tensor.dtype).removeprefix('torch.')}: numbers with and without fractions "
                "are not converted into one another"
            )
    return found, missing


def _union_each(
    mesh: Mesh, run: Callable[[], tuple[list[str], list[str]]]
) -> tuple[list[str], list[str]]:
    """Both lists of every rank, each sentence once."""
    first, second = zip(*on_each(mesh, run), strict=True)
    return _union(first), _union(second)


def _union(ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return all entries of the ranks, each once."""
    return list(dict.fromkeys(text for texts in ranks for text in texts))
