"""Saving: every rank writes its share, one rank commits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kenotron_ckpt.cut import Tensors, blocks_of, dtype_name, problems_of, share_of
from kenotron_ckpt.folder import commit, prepare, sweep
from kenotron_ckpt.index import FileEntry, Manifest, Record, merge_records, records_from_json
from kenotron_ckpt.together import on_each, on_first
from kenotron_ckpt.writer import unstorable, write_blocks
from kenotron_dist import Mesh

_LIBRARIES = ("kenotron-ckpt", "kenotron-dist", "safetensors", "torch")


def save(
    folder: str | Path,
    step: int,
    tensors: Tensors,
    mesh: Mesh,
    state: Mapping[str, Any],
    config_text: str | None = None,
    *,
    file_bytes: int = 2 * 10**9,
) -> Path:
    """Write the checkpoint ``<folder>/<step>/`` and make it the latest; returns its path.

    Collective over the mesh. ``folder`` must be shared by all nodes.

    Arguments:
        folder: the run folder; made if need be.
        step: training steps done, from 0.
        tensors: this rank's (local tensor, layout), by any unique key; ``layout.name`` names the
            record. With a ``FlatSlice`` in the layout the tensor is that slice, 1-D. The union
            over the ranks must be whole; padding is not stored; replicas must be equal.
        mesh: the ranks that call.
        state: JSON values (keys are strings, tuples come back as lists); rank 0's is written.
        config_text: text of a ``config.yaml`` for people to read; rank 0's is written.
        file_bytes: a rank starts another file when one would get more data than this.

    On return the checkpoint is on the disk. A failure at any moment leaves what was there before
    (the former checkpoint of this step, or nothing that is taken for one) or the new one, whole.

    Raises on every rank: ValueError for a bad argument, a tensor that contradicts its layout, or a
    record that is not covered exactly once; OSError when a rank cannot write.
    """
    step_folder = Path(folder) / str(step)
    on_each(mesh, lambda: _check(step, tensors, mesh, state, file_bytes))
    tag = on_first(mesh, lambda: prepare(step_folder))
    try:
        shares = on_each(mesh, lambda: _write(step_folder, tag, tensors, mesh, file_bytes))
        on_first(mesh, lambda: _commit(step_folder, shares, step, mesh, state, config_text))
    except Exception:
        if mesh.rank == 0:
            _discard(step_folder)
        raise
    return step_folder


def _check(
    step: int, tensors: Tensors, mesh: Mesh, state: Mapping[str, Any], file_bytes: int
) -> None:
    problems = [*problems_of(tensors, mesh.sizes, mesh.coords), *unstorable(tensors)]
    if step < 0:
        problems.append(f"step = {step}: steps are counted from 0")
    if file_bytes < 1:
        problems.append(f"file_bytes = {file_bytes}: a file holds at least 1 byte")
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        problems.append(f"state is not made of JSON values: {error}")
    if problems:
        raise ValueError("\n".join(problems))


def _write(
    step_folder: Path, tag: str, tensors: Tensors, mesh: Mesh, file_bytes: int
) -> dict[str, Any]:
    """Write this rank's share; returns it as JSON."""
    blocks = share_of(blocks_of(tensors, mesh.sizes, mesh.coords), mesh.sizes, mesh.coords)
    stem = f"shard-{mesh.rank:05d}-of-{mesh.world.size:05d}{tag}"
    records, files = write_blocks(step_folder, stem, blocks, file_bytes)
    for tensor, layout in tensors.values():  # a tensor without elements is a record all the same
        if 0 in layout.shape:
            records[layout.name] = Record(layout.shape, dtype_name(tensor.dtype))
    return {
        "records": {name: asdict(record) for name, record in records.items()},
        "files": {name: asdict(entry) for name, entry in files.items()},
    }


def _commit(
    step_folder: Path,
    shares: list[dict[str, Any]],
    step: int,
    mesh: Mesh,
    state: Mapping[str, Any],
    config_text: str | None,
) -> None:
    manifest = Manifest(
        step=step,
        mesh=mesh.sizes,
        records=merge_records([records_from_json(share["records"]) for share in shares]),
        files={n: FileEntry(**entry) for share in shares for n, entry in share["files"].items()},
        state=state,
        config=config_text,
        libraries={name: version(name) for name in _LIBRARIES},
    )
    commit(step_folder, manifest)


def _discard(step_folder: Path) -> None:
    """After a failed save: give the space back. What cannot be removed now, the next save will."""
    with contextlib.suppress(OSError):
        sweep(step_folder)
        step_folder.rmdir()  # only when there is nothing else in it
