"""The part of a checkpoint that one rank writes: planned, and written part by part."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kenotron_ckpt.blocks import (
    PIECE_BYTES,
    Tensors,
    blocks_of,
    dtype_name,
    problems_of,
    share_of,
)
from kenotron_ckpt.committing import commit
from kenotron_ckpt.coverage import merge_records
from kenotron_ckpt.generation import Generation
from kenotron_ckpt.index import FileEntry, Manifest, Record, records_from_json, records_to_json
from kenotron_ckpt.part_files import PartFile, plan_parts, unstorable
from kenotron_ckpt.protocol import SaveMoment, passed
from kenotron_ckpt.store import Store
from kenotron_ckpt.writer import Share
from kenotron_dist import Mesh

FILE_BYTES = 1 << 31
"""A file has no more data than this."""
_LIBRARIES = ("kenotron-ckpt", "kenotron-dist", "torch")


@dataclass(frozen=True, eq=False)
class WritePlan:
    """The files that a rank writes, for tensors that stay where they are in memory."""

    parts: Sequence[PartFile]
    empty: Mapping[str, Record]
    """Tensors without elements: records all the same."""
    urgent: int
    """So many of the first parts hold values that change before the next update."""

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(part.nbytes for part in self.parts)


def plan_share(
    tensors: Tensors,
    mesh: Mesh,
    file_bytes: int,
    volatile: Collection[str] = (),
    *,
    pool_bytes: int | None = None,
    threads: int = 1,
) -> WritePlan:
    """Plan the files of this rank.

    Args:
        tensors, mesh, file_bytes: see ``save``.
        volatile: keys of the tensors that come in the first files.
        pool_bytes: host memory that copies may take; files are then small enough for two of them.
        threads: number of threads that write, each to a file of its own.

    Raises:
        ValueError: a line for each tensor that cannot be saved.
    """
    # What cannot be saved is refused before anything is planned.
    problems = problems_of(tensors, mesh.view) or unstorable(tensors)
    problems += [f"volatile: {key} is not among the tensors" for key in {*volatile} - {*tensors}]
    if file_bytes < 1:
        problems.append(f"file_bytes = {file_bytes}: a file holds at least 1 byte")
    if problems:
        raise ValueError("\n".join(problems))
    early = {layout.name for key, (_, layout) in tensors.items() if key in volatile}
    # Which blocks this rank writes, and how large a file may be: two fit into the pool.
    half = PIECE_BYTES if pool_bytes is None else max(1, pool_bytes // 2)
    blocks = share_of(blocks_of(tensors, mesh.view), mesh.view, min(half, PIECE_BYTES))
    total = sum(block.nbytes for block in blocks)
    limit = min(file_bytes, max(PIECE_BYTES, -(-total // threads)))
    if pool_bytes is not None and total > pool_bytes:
        limit = min(limit, half)
    # Files: values that change soon come first, tensors without elements need none.
    first = plan_parts([block for block in blocks if block.name in early], limit)
    rest = plan_parts([b for b in blocks if b.name not in early], limit, len(first))
    empty = {
        layout.name: Record(layout.shape, dtype_name(tensor.dtype))
        for tensor, layout in tensors.values()
        if 0 in layout.shape
    }
    return WritePlan((*first, *rest), empty, len(first))


def sizes_of(mesh: Mesh) -> dict[str, int]:
    """Return a manifest's entry of a mesh: sizes of its axes, and ep where it is not 1."""
    return {**mesh.sizes, **({"ep": mesh.config.ep} if mesh.config.ep > 1 else {})}


def stem_of(mesh: Mesh, tag: str) -> str:
    """Return the prefix of the names of this rank's files."""
    return f"shard-{mesh.rank:05d}-of-{mesh.world.size:05d}{tag}"


def share_as_json(
    written: Iterable[Share], empty: Mapping[str, Record], rank_state: Any
) -> dict[str, Any]:
    """Return a rank's report to the one that commits.

    Args:
        written: contents of its files, in their order.
        empty: its tensors without elements.
        rank_state: its own state.
    """
    records: dict[str, Record] = dict(empty)
    files: dict[str, FileEntry] = {}
    for found, entries in written:
        _add_records(records, found)
        files |= entries
    return {
        "records": records_to_json(records),
        "files": {name: vars(entry) for name, entry in files.items()},
        "state": rank_state,
    }


def _add_records(records: dict[str, Record], found: Mapping[str, Record]) -> None:
    """Add what one more file holds; a record may continue in it."""
    for name, record in found.items():
        pieces = records[name].pieces if name in records else ()
        records[name] = Record(record.shape, record.dtype, (*pieces, *record.pieces))


def commit_shares(
    step_folder: Store,
    shares: Sequence[dict[str, Any]],
    mesh: Mesh,
    state: Mapping[str, Any],
    config_text: str | None,
    verified: bool = False,
    generation: Generation | None = None,
) -> None:
    """Make a checkpoint of what all ranks wrote: ``shares`` are theirs, by rank.

    Raises ValueError when a record is not covered exactly once, a file is not there, or a later
    ``generation`` has taken the run.
    """
    passed(SaveMoment.ALL_WRITTEN)
    manifest = manifest_of(step_folder, shares, mesh, state, config_text, generation)
    commit(step_folder, manifest, verified=verified)


def manifest_of(
    step_folder: Store,
    shares: Sequence[dict[str, Any]],
    mesh: Mesh,
    state: Mapping[str, Any],
    config_text: str | None,
    generation: Generation | None,
) -> Manifest:
    """Return the manifest of what all ranks wrote; see ``commit_shares``, also for errors."""
    own = [share["state"] for share in shares]
    manifest = Manifest(
        step=int(step_folder.name),
        mesh=sizes_of(mesh),
        generation=generation.number if generation else 0,
        records=merge_records([records_from_json(share["records"]) for share in shares]),
        files={n: FileEntry(**entry) for share in shares for n, entry in share["files"].items()},
        state=state,
        rank_states=own if any(each is not None for each in own) else (),
        config=config_text,
        libraries={name: _version(name) for name in _LIBRARIES},
    )
    if generation is not None:
        generation.check()
    return manifest


def check_state(step: int, state: Mapping[str, Any], rank_state: Any) -> None:
    """Raise ValueError, a line for each problem of what is saved next to the tensors."""
    problems = []
    if not isinstance(step, int):
        problems.append(f"step = {step!r}: give a whole number, an int")
    elif step < 0:
        problems.append(f"step = {step}: steps are counted from 0")
    for name, value in (("state", state), ("rank_state", rank_state)):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            what = _culprit(name, value) if isinstance(error, TypeError) else ""
            problems.append(f"{name} is not made of JSON values: {what or error}")
        else:
            problems += [fault] if (fault := _key_of_no_string(name, value)) else []
    if problems:
        raise ValueError("\n".join(problems))


def _culprit(path: str, value: Any) -> str:
    """The first value below ``path`` that JSON does not know, with its type; empty: none."""
    if isinstance(value, (dict, list, tuple)):
        return next(filter(None, (_culprit(f"{path}[{k!r}]", v) for k, v in _items(value))), "")
    known = value is None or isinstance(value, (str, int, float))
    return "" if known else f"{path} is a {type(value).__name__}"


def _key_of_no_string(path: str, value: Any) -> str:
    """A sentence for the first mapping whose keys JSON would turn into strings; empty: none."""
    for key, each in _items(value):
        if isinstance(value, dict) and not isinstance(key, str):
            return f"{path}: key {key!r} would be read back as a string; make it one"
        inner = isinstance(each, (dict, list, tuple))
        if inner and (found := _key_of_no_string(f"{path}[{key!r}]", each)):
            return found
    return ""


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a dict or a list, with their keys or indices."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def check_positive(**numbers: int | None) -> None:
    """Raise ValueError for what is no whole number, or is below 1; None is none."""
    for name, number in numbers.items():
        if number is not None and not isinstance(number, int):
            raise ValueError(f"{name}: {number!r} was given; it must be a whole number")
        if number is not None and number < 1:
            raise ValueError(f"{name}: {number} was given; it must be at least 1")


def _version(library: str) -> str:
    """Return the installed version of a library, which may also be found on the path alone."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
