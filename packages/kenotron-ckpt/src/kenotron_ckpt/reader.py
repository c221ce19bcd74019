"""Loading: any mesh reads what any mesh wrote, and only the slices that it needs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kenotron_ckpt.cut import Block, Tensors, blocks_of, problems_of
from kenotron_ckpt.folder import manifest_at, resolve
from kenotron_ckpt.index import Manifest, Shape, overlap
from kenotron_ckpt.together import on_all, on_each, on_first
from kenotron_dist import Mesh, gather_objects


@dataclass(frozen=True, eq=False)
class _Read:
    """Part of a stored piece, and where its elements go."""

    file: str
    key: str
    part: tuple[slice, ...] | None
    """Range within the piece; None for all of it."""
    target: Tensor


def load(path: str | Path, wanted: Tensors, mesh: Mesh, *, verify: bool = True) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint that any mesh wrote; returns the saved state.

    Collective over the mesh. The checkpoint's own mesh does not matter.

    Arguments:
        path: a step folder, or a run folder (its latest complete checkpoint is read).
        wanted: this rank's (local tensor, layout), by any unique key; several may want different
            slices of one record, several ranks the same. Values are cast to the tensor's dtype.
            Padding, which no checkpoint holds, is left untouched.
        mesh: the ranks that call.
        verify: compare the checksums of the files that are needed, each on one rank.

    Raises ValueError on every rank, before any tensor is changed: no checkpoint there; records
    that are missing or of another global shape (all are listed); tensors that contradict their
    layouts; a file that is not what was written. OSError when a file cannot be read.
    """
    step_folder = Path(on_first(mesh, lambda: str(resolve(path))))
    manifest = on_all(mesh, lambda: manifest_at(step_folder))
    problems = on_each(mesh, lambda: _problems(manifest, wanted, mesh))
    _raise(step_folder, _union(problems))
    reads = on_all(mesh, lambda: _plan(manifest, blocks_of(wanted, mesh.sizes, mesh.coords)))
    if verify:
        needed = gather_objects(sorted({read.file for read in reads}), mesh.world)
        own = sorted(_union(needed))[mesh.rank :: mesh.world.size]
        damaged = on_each(mesh, lambda: _damaged(step_folder, manifest, own))
        _raise(step_folder, _union(damaged))
    on_all(mesh, lambda: _read(step_folder, reads))
    return dict(manifest.state)


def verify_files(path: str | Path) -> list[str]:
    """One sentence for every file of a checkpoint whose bytes are not those that were written.

    Raises ValueError when there is no checkpoint (see ``resolve``).
    """
    step_folder = resolve(path)
    manifest = manifest_at(step_folder)
    return _damaged(step_folder, manifest, manifest.files)


def _problems(manifest: Manifest, wanted: Tensors, mesh: Mesh) -> list[str]:
    found = problems_of(wanted, mesh.sizes, mesh.coords)
    for _, layout in wanted.values():
        record = manifest.records.get(layout.name)
        if record is None:
            near = get_close_matches(layout.name, manifest.records, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            found.append(f"{layout.name}: no such record among {len(manifest.records)}{hint}")
        elif record.shape != layout.shape:
            found.append(
                f"{layout.name}: the record has shape {list(record.shape)}, the model "
                f"{list(layout.shape)}"
            )
    return found


def _union(ranks: Sequence[Sequence[str]]) -> list[str]:
    """What the ranks have, each once."""
    return list(dict.fromkeys(text for texts in ranks for text in texts))


def _raise(step_folder: Path, problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("\n  ".join([f"cannot load {step_folder}:", *problems]))


def _plan(manifest: Manifest, blocks: Sequence[Block]) -> list[_Read]:
    """What to read for the blocks that this rank holds."""
    reads = []
    for block in blocks:
        box = (block.box.start, block.box.shape)
        left = block.box.numel
        for piece in manifest.records[block.name].pieces:
            shared = overlap(box, (piece.start, piece.shape))
            if shared:
                start, shape = shared
                part = None if shape == piece.shape else _within(piece.start, start, shape)
                target = block.view[_within(block.box.start, start, shape)]
                reads.append(_Read(piece.file, piece.key, part, target))
                left -= math.prod(shape)
        if left:
            raise ValueError(f"{block.name}: manifest.json is damaged: its pieces are not whole")
    return reads


def _within(origin: Shape, start: Shape, shape: Shape) -> tuple[slice, ...]:
    """The block (start, shape) counted from ``origin``."""
    return tuple(slice(a - o, a - o + n) for o, a, n in zip(origin, start, shape, strict=True))


def _damaged(step_folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        with (step_folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != manifest.files[name].sha256:
            found.append(
                f"{name}: its bytes are not those that were written (SHA-256 is {digest}, the "
                f"manifest says {manifest.files[name].sha256})"
            )
    return found


@torch.no_grad()
def _read(step_folder: Path, reads: Sequence[_Read]) -> None:
    by_file: dict[str, list[_Read]] = {}
    for read in reads:
        by_file.setdefault(read.file, []).append(read)
    for name, group in by_file.items():
        try:
            with safe_open(step_folder / name, framework="pt") as file:
                for read in group:
                    values = (
                        file.get_tensor(read.key)
                        if read.part is None
                        else file.get_slice(read.key)[read.part]
                    )
                    read.target.copy_(values)
        except SafetensorError as error:
            raise ValueError(f"{step_folder / name} is not what was written: {error}") from None
