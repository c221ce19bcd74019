"""Reading pieces into tensors: only the rows that are needed, straight to where they belong.

No rank asks another anything here; ``loading`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from xxhash import xxh3_64

from kenotron_ckpt.blocks import OwnBlock
from kenotron_ckpt.checksums import outer_fault, piece_fault, unreadable
from kenotron_ckpt.coverage import overlap
from kenotron_ckpt.index import FileEntry, Manifest, Piece, Record
from kenotron_ckpt.records import Shape
from kenotron_ckpt.store import Location, Store, StoreFile, store_at
from kenotron_ckpt.threads import set_device
from kenotron_ckpt.writer import as_bytes

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Read:
    """Part of a stored piece, and where its elements go."""

    piece: Piece
    dtype: torch.dtype
    part: tuple[slice, ...]
    """Range within the piece."""
    target: Tensor

    @property
    def whole(self) -> bool:
        """True where every byte of the piece is read: its rows are, and columns are cut later."""
        return not self.part or self.part[0] == slice(0, self.piece.shape[0])


def plan_reads(records: Mapping[str, Record], blocks: Sequence[OwnBlock]) -> list[Read]:
    """Plan the reads for the blocks that this rank holds.

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


def fill(folder: Location, reads: Sequence[Read]) -> None:
    """Carry out ``reads``; values are cast to the dtype of their target. Raises OSError.

    Checksums are not compared.
    """
    store = store_at(folder)
    _on_files(reads, store.threads, lambda name, own, _: _read_file(store, name, own))


def fill_verified(store: Store, reads: Sequence[Read], files: Mapping[str, FileEntry]) -> list[str]:
    """Carry out ``reads`` as ``fill`` does, and hash the pieces that are read whole as they arrive.

    Nothing is read twice: a target of a faulty piece holds damaged values afterwards.

    Args:
        store: the step folder.
        reads: what to read; where ``Read.whole`` is False, the checksum is not compared.
        files: what each file must be; its length and its header are compared as well.

    Returns:
        One sentence for every fault; of a file that cannot be read, why.
    """

    def run(name: str, own: Sequence[Read], first: bool) -> list[str]:
        return _read_and_hash(store, name, own, files[name] if first else None)

    found = _on_files(reads, store.threads, run)
    return list(dict.fromkeys(fault for faults in found for fault in faults))


def invalidate(reads: Sequence[Read]) -> None:
    """Set every floating-point target to NaN: damaged values are never used unnoticed."""
    with torch.no_grad():
        for read in reads:
            if read.target.is_floating_point() or read.target.is_complex():
                read.target.fill_(math.nan)


def _on_files(
    reads: Sequence[Read], threads: int, run: Callable[[str, Sequence[Read], bool], T]
) -> list[T]:
    """Call ``run(file, some of its reads, whether they are its first)`` in threads; the results."""
    files: dict[str, list[Read]] = {}
    for read in reads:
        files.setdefault(read.piece.file, []).append(read)
    devices = [read.target.device for read in reads if read.target.device.type != "cpu"]
    begin = set_device(devices[0] if devices else torch.device("cpu"))
    # So many files are open at a time, of thousands.
    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        jobs = [
            pool.submit(run, name, own[first::threads], first == 0)
            for name, own in files.items()
            for first in range(min(threads, len(own)))
        ]
        return [job.result() for job in jobs]


def read_record(step_folder: Location, manifest: Manifest, name: str) -> Tensor:
    """One whole logical tensor, of its record's shape, on the CPU, in the dtype it was saved in.

    Raises KeyError when there is no such record, OSError when a file cannot be read. Checksums are
    not compared.
    """
    record = manifest.records[name]
    return read_box(step_folder, record, (0,) * len(record.shape), record.shape)


def read_box(folder: Location, record: Record, start: Shape, shape: Shape) -> Tensor:
    """Return a block of a record, on the CPU, in its saved dtype; nothing else is read.

    Checksums are not compared.

    Args:
        folder: where the record's files are.
        record: of a manifest.
        start: first index along every dimension.
        shape: extent along every dimension, which is the shape of the result.

    Raises:
        OSError: a file cannot be read.
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


def _read_file(store: Store, name: str, reads: Sequence[Read]) -> None:
    with store.open(name) as file:
        for read in reads:
            _read(file, read)


def _read_and_hash(
    store: Store, name: str, reads: Sequence[Read], entry: FileEntry | None
) -> list[str]:
    """List what is wrong with the pieces read whole; with an ``entry``, with the rest too.

    Every read is carried out as far as the file can be read.
    """
    faults = []
    try:
        with store.open(name) as file:
            if entry is not None and (fault := outer_fault(name, file, entry)):
                faults.append(fault)
            for read in reads:
                checksum = xxh3_64() if read.whole else None
                _read(file, read, checksum)
                if checksum is not None and checksum.hexdigest() != read.piece.checksum:
                    faults.append(piece_fault(name, read.piece))
    except OSError as error:
        faults.append(unreadable(name, error))
    return faults


def _read(file: StoreFile, read: Read, checksum: xxh3_64 | None = None) -> None:
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
        _into(file, read.target, begin, checksum)
        return
    scratch = torch.empty(shape, dtype=read.dtype)
    _into(file, scratch, begin, checksum)
    read.target.copy_(scratch[rows])


def _into(file: StoreFile, target: Tensor, begin: int, checksum: xxh3_64 | None) -> None:
    """Read bytes into a tensor; those that are hashed by the chunk, while the cache has them."""
    view = as_bytes(target)
    chunk = len(view) if checksum is None else file.chunk
    while view:
        got = file.read_into(view[:chunk], begin)
        if got == 0:
            raise OSError(f"a file ends at byte {begin}, within a piece: it was cut off just now")
        if checksum is not None:
            checksum.update(view[:got])
        view, begin = view[got:], begin + got


def _within(origin: Shape, start: Shape, shape: Shape) -> tuple[slice, ...]:
    """The block (start, shape) counted from ``origin``."""
    return tuple(slice(a - o, a - o + n) for a, o, n in zip(start, origin, shape, strict=True))
