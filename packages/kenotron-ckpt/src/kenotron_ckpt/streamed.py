"""Saving tensors that are made one at a time, by one process: a conversion in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt.blocks import OwnBlock, blocks_of, share_of
from kenotron_ckpt.lock import FolderLock
from kenotron_ckpt.part_files import plan_parts, unstorable
from kenotron_ckpt.preparing import prepare
from kenotron_ckpt.saving import discard
from kenotron_ckpt.share import FILE_BYTES, check_state, commit_shares, share_as_json, stem_of
from kenotron_ckpt.store import LocalStore
from kenotron_ckpt.writer import write_part
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout


@dataclass(frozen=True)
class StreamedTensor:
    """A logical tensor that is made when its turn comes. It has elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Makes it, on the CPU, of that shape and dtype."""


def save_streamed(
    folder: str | Path,
    step: int,
    sources: Mapping[str, StreamedTensor],
    state: Mapping[str, Any],
    config_text: str | None = None,
    *,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write the checkpoint ``<folder>/<step>/`` as ``save`` does, one tensor at a time in memory.

    For one process. ``sources`` are by record name; a record that files share is made once for
    each file. Other arguments, and what a failure leaves, are those of ``save``.

    Raises ValueError for a bad argument and when a run is writing to the folder, OSError when a
    file cannot be written, and what a source raises; no checkpoint is left of it then.
    """
    mesh = Mesh.connect()
    check_state(step, state, None)
    planned = {
        name: (
            torch.empty(one.shape, dtype=one.dtype, device="meta"),
            TensorLayout(name, one.shape),
        )
        for name, one in sources.items()
    }
    if problems := unstorable(planned):
        raise ValueError("\n".join(problems))
    blocks = share_of(blocks_of(planned, mesh.view), mesh.view)
    path = Path(folder) / str(step)
    step_folder = LocalStore(path)
    lock = FolderLock(path.parent)
    try:
        stem = stem_of(mesh, prepare(step_folder))
        written = (
            write_part(step_folder, stem, part, _made(part.blocks, sources), verify=False)
            for part in plan_parts(blocks, file_bytes)
        )
        commit_shares(step_folder, [share_as_json(written, {}, None)], mesh, state, config_text)
    except Exception:
        discard(step_folder)
        raise
    finally:
        lock.release()
    return path


def _made(blocks: Sequence[OwnBlock], sources: Mapping[str, StreamedTensor]) -> Iterator[Tensor]:
    """The values of blocks; those of one tensor follow one another, and it is made once."""
    name, whole = "", torch.empty(0)
    for block in blocks:
        if block.name != name:
            del whole  # before the next one is made
            name, whole = block.name, sources[block.name].read()
        yield block.box.of_global(whole).clone()  # a view would keep it alive next to the next one
