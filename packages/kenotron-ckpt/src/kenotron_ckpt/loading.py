"""Loading: any mesh reads what any mesh wrote; the newest checkpoint whose bytes are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kenotron_ckpt.blocks import Tensors
from kenotron_ckpt.checkpoint import Checkpoint, DamagedCheckpoint, Loaded
from kenotron_ckpt.checksums import manifest_faults
from kenotron_ckpt.collective_errors import on_all, on_first
from kenotron_ckpt.folder import (
    LATEST,
    complete_manifest,
    defect,
    manifest_at,
    points_nowhere,
    preferred,
    step_names,
)
from kenotron_ckpt.index import Manifest
from kenotron_ckpt.store import Location, Store, store_at
from kenotron_dist import Mesh

T = TypeVar("T")


class NoCheckpoint(ValueError):
    """There is no checkpoint at a path, or none that can be read and is undamaged."""


def read_preferred(path: Location, mesh: Mesh, read: Callable[[Checkpoint], T]) -> T:
    """Read the preferred checkpoint at a path; where its bytes are damaged, the next one.

    Collective over the mesh. In a run folder the one that ``latest.txt`` names comes first, then
    the others from the newest on. A checkpoint with an invalid manifest, or a file that is missing
    or of another length, is passed over before ``read`` is called.

    Args:
        path: a step folder or a run folder, local or in a remote store. What is read of a remote
            one are the ranges of its files that this rank needs.
        mesh: the ranks that call.
        read: loads what it needs and returns a result. It is called again, with the next
            checkpoint, when it raises DamagedCheckpoint on every rank; then it must fill all that
            the call before may have filled. ``passed_over``: why others were not taken.

    Returns:
        What ``read`` returned.

    Raises:
        NoCheckpoint: on every rank, when there is none; the message has all reasons. Tensors that
            ``read`` filled are NaN then (see ``DamagedCheckpoint``). Other errors of ``read`` are
            passed on.
    """
    store = on_all(mesh, lambda: store_at(path))
    try:
        found = on_first(mesh, lambda: step_names(store))
    except ValueError as error:
        raise NoCheckpoint(str(error)) from error
    reasons = on_first(mesh, lambda: _stray(store, found))
    for name in found:
        checkpoint, fault = _opened(store.at(name), mesh)
        faults = [fault]
        if checkpoint is not None:
            newer = on_first(mesh, lambda name=name: _newer(store, name, found))
            checkpoint.passed_over = [*reasons, *newer]
            try:
                return read(checkpoint)
            except DamagedCheckpoint as error:
                faults = error.faults
        reasons.append(f"{store.at(name)}: {'; '.join(faults[:3])}" + _more(faults))
    raise NoCheckpoint("\n  ".join([f"no checkpoint at {path} can be read:", *reasons]))


def open_checkpoint(
    path: Location,
    mesh: Mesh,
    *,
    select: Callable[[str], bool] = lambda _: True,
    verify: bool = True,
) -> Checkpoint:
    """Find a checkpoint and read its bytes; of a run folder, the first that is whole and right.

    Collective over the mesh. A later ``load`` reads the bytes a second time and finds no damage:
    no tensor is ever changed by a damaged checkpoint. ``load`` and ``read_preferred`` read once.

    Args:
        path: a step folder or a run folder.
        mesh: the ranks that call.
        select: True for the names of the records that count
            (``lambda name: not name.startswith("optimizer.")`` for parameters only).
        verify: compare checksums; else only the manifest and the lengths of files.

    Raises:
        NoCheckpoint: on every rank, when there is none; the message has all reasons.
    """

    def read(checkpoint: Checkpoint) -> Checkpoint:
        if verify and (faults := checkpoint.verify(select)):
            raise DamagedCheckpoint(checkpoint.store, faults, filled=False)
        return checkpoint

    return read_preferred(path, mesh, read)


def load(
    path: Location, wanted: Tensors, mesh: Mesh, *, verify: bool = True, strict: bool = True
) -> Loaded:
    """Fill tensors in place from the preferred checkpoint at a path, that any mesh wrote.

    Collective over the mesh. Only what is wanted is verified, while it is read. A damaged
    checkpoint may have filled tensors when its damage is found; the next one then fills them all
    again, and what is returned is undamaged. After NoCheckpoint, or another error about an older
    checkpoint, they are NaN. ``open_checkpoint(path, mesh).load(wanted)`` reads everything twice
    and leaves tensors as they are. See ``read_preferred`` and
    ``Checkpoint.load`` for arguments and errors.
    """
    return read_preferred(
        path, mesh, lambda found: found.load(wanted, verify=verify, strict=strict)
    )


def verify_files(path: Location) -> list[str]:
    """One sentence for every file, and piece of one, whose bytes are not those that were written.

    Raises ValueError when there is no checkpoint (see ``preferred``). One process reads all.
    """
    return manifest_faults(*preferred(path))


def _opened(store: Store, mesh: Mesh) -> tuple[Checkpoint | None, str]:
    """A checkpoint whose files have their lengths; or why it is none. Rank 0 reads it once."""
    held: list[Manifest] = []

    def examine() -> str:
        found = complete_manifest(store)
        if isinstance(found, str):
            return found
        held.append(found)
        return ""

    fault = on_first(mesh, examine)
    if fault:
        return None, fault
    manifest = on_all(mesh, lambda: held[0] if held else manifest_at(store))
    return Checkpoint(store, manifest, mesh), ""


def _stray(store: Store, found: Sequence[str]) -> list[str]:
    """A sentence when ``latest.txt`` of a run folder names nothing that is there."""
    stray = points_nowhere(store, found)
    return [f"{store.at(LATEST)}: it names no step that is here"] if stray else []


def _newer(store: Store, chosen: str, found: Sequence[str]) -> list[str]:
    """Return why newer checkpoints were not tried: a run set back, or a save not finished."""
    later = found[found.index(chosen) + 1 :]
    return [
        f"{store.at(name)}: {defect(store.at(name)) or 'latest.txt names another'}"
        for name in later
        if int(name) > int(chosen)
    ]


def _more(faults: Sequence[str]) -> str:
    return f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
