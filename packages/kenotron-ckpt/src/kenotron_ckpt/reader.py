"""Reading pieces into tensors: only the rows that are needed, straight to where they belong.

No rank asks another anything here; ``loading`` does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kenotron_ckpt.coverage import overlap
from kenotron_ckpt.cut import Block
from kenotron_ckpt.index import Manifest, Piece, Record, Shape
from kenotron_ckpt.writer import as_bytes

THREADS = 4
"""Threads that read: they wait for the disk, or copy from its cache without Python's lock."""


@dataclass(frozen=True, eq=False)
class Read:
    """Part of a stored piece, and where its elements go."""

    piece: Piece
    dtype: torch.dtype
    part: tuple[slice, ...]
    """Range within the piece."""
    target: Tensor


def plan_reads(records: Mapping[str, Record], blocks: Sequence[Block]) -> list[Read]:
    """What to read for the blocks that this rank holds.

    Raises ValueError when the pieces of a record leave elements out.
    """
    reads = []
    for block in blocks:
        box, record = (block.box.start, block.box.shape), records[block.name]
        dtype = getattr(torch, record.dtype)
        left = block.box.numel
        for piece in record.pieces:
            shared = overlap(box, (piece.start, piece.shape))
            if shared:
                start, shape = shared
                target = block.view.detach()[_within(block.box.start, start, shape)]
                reads.append(Read(piece, dtype, _within(piece.start, start, shape), target))
                left -= math.prod(shape)
        if left:
            raise ValueError(f"{block.name}: manifest.json is damaged: its pieces are not whole")
    return reads


def fill(step_folder: Path, reads: Sequence[Read], threads: int = THREADS) -> None:
    """Carry out ``reads``; values are cast to the dtype of their target. Raises OSError."""
    files: dict[str, list[Read]] = {}
    for read in reads:
        files.setdefault(read.piece.file, []).append(read)
    with ThreadPoolExecutor(threads) as pool:  # so many files are open at a time, of thousands
        jobs = [
            pool.submit(_read_file, step_folder / name, own[first::threads])
            for name, own in files.items()
            for first in range(min(threads, len(own)))
        ]
        for job in jobs:
            job.result()


def read_record(step_folder: Path, manifest: Manifest, name: str) -> Tensor:
    """One whole logical tensor, on the CPU, in the dtype it was saved in.

    Raises KeyError when there is no such record, OSError when a file cannot be read. Checksums are
    not compared.
    """
    record = manifest.records[name]
    return read_box(step_folder, record, (0,) * len(record.shape), record.shape)


def read_box(folder: Path, record: Record, start: Shape, shape: Shape) -> Tensor:
    """A block of a record, on the CPU, in the dtype it was saved in; nothing else is read.

    Arguments: where the record's files are; first index and extent along every dimension. Raises
    OSError when a file cannot be read. Checksums are not compared.
    """
    whole = torch.empty(shape, dtype=getattr(torch, record.dtype))
    reads = []
    for piece in record.pieces:
        shared = overlap((start, shape), (piece.start, piece.shape))
        if shared:
            begin, extent = shared
            target = whole[_within(start, begin, extent)]
            reads.append(Read(piece, whole.dtype, _within(piece.start, begin, extent), target))
    fill(folder, reads)
    return whole


def _read_file(path: Path, reads: Sequence[Read]) -> None:
    with path.open("rb", buffering=0) as file:
        for read in reads:
            _read(file.fileno(), read)


def _read(handle: int, read: Read) -> None:
    """Read the rows of the piece that the part touches, and copy what is wanted of them."""
    rows, begin, nbytes = read.part, read.piece.offset, read.piece.bytes
    shape = list(read.piece.shape)
    if shape:
        row = nbytes // shape[0]
        begin += rows[0].start * row
        shape[0] = rows[0].stop - rows[0].start
        rows = (slice(0, shape[0]), *rows[1:])
    whole = list(read.target.shape) == shape
    host = read.target.device.type == "cpu" and read.target.dtype == read.dtype
    if whole and host and read.target.is_contiguous():
        _into(handle, read.target, begin)
        return
    scratch = torch.empty(shape, dtype=read.dtype)
    _into(handle, scratch, begin)
    read.target.copy_(scratch[rows])


def _into(handle: int, target: Tensor, begin: int) -> None:
    view = as_bytes(target)
    while view:
        got = os.preadv(handle, [view], begin)
        if got == 0:
            raise OSError(f"a file ends at byte {begin}, within a piece: it was cut off just now")
        view, begin = view[got:], begin + got


def _within(origin: Shape, start: Shape, shape: Shape) -> tuple[slice, ...]:
    """The block (start, shape) counted from ``origin``."""
    return tuple(slice(a - o, a - o + n) for a, o, n in zip(start, origin, shape, strict=True))
