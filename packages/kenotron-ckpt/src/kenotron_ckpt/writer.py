"""Parts to files: written and summed in one go, on the disk when it returns.

Writing and checksums leave Python's lock alone: a thread may do this during training.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from torch import Tensor
from xxhash import xxh3_64_hexdigest

from kenotron_ckpt.blocks import OwnBlock
from kenotron_ckpt.checksums import file_faults
from kenotron_ckpt.index import FileEntry, Record
from kenotron_ckpt.part_files import PartFile
from kenotron_ckpt.protocol import SaveMoment, passed
from kenotron_ckpt.store import LocalStore, Store

Share = tuple[dict[str, Record], dict[str, FileEntry]]
"""Output of one rank: its pieces of the records, and its files."""

_CHUNK = 1 << 24
"""Bytes that are summed and written while they are in the processor's cache, or nearly."""


def write_part(
    folder: Store, stem: str, part: PartFile, hosts: Iterable[Tensor], verify: bool
) -> Share:
    """Write one part to ``<stem><suffix>.safetensors``.

    Args:
        folder: the step folder.
        stem: prefix of the names of this rank's files.
        part: the part.
        hosts: values of its blocks in host memory, contiguous, each of its block's shape, in the
            order of the part; they are asked for one by one.
        verify: read the file back from the disk and compare.

    Raises:
        OSError: the file cannot be written, or what is read back is not what was written.
    """
    name = f"{stem}{part.suffix}.safetensors"
    checksums = []
    with folder.create(name) as handle:
        passed(SaveMoment.SHARD_OPENED)
        _write(handle, memoryview(part.header))
        passed(SaveMoment.HEADER_WRITTEN)
        for host in hosts:
            checksums.append(xxh3_64_hexdigest(view := as_bytes(host)))
            _write(handle, view)
            passed(SaveMoment.BLOCK_WRITTEN)
    passed(SaveMoment.SHARD_SYNCED)
    records, files = part.records(name, checksums), {name: part.entry()}
    if verify:
        _read_back(folder, name, records, files[name])
    return records, files


def streamed(blocks: Iterable[OwnBlock]) -> Iterable[Tensor]:
    """The values of blocks in host memory, one block at a time, each of its block's shape."""
    for block in blocks:
        yield block.view.detach().cpu().contiguous()


def as_bytes(host: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of any shape in host memory, not copied.

    The tensor must outlive them.
    """
    size = host.numel() * host.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(host.data_ptr())).cast("B")


def _write(handle: int, view: memoryview) -> None:
    for begin in range(0, len(view), _CHUNK):
        rest = view[begin : begin + _CHUNK]
        while rest:
            rest = rest[os.write(handle, rest) :]


def _read_back(folder: Store, name: str, records: dict[str, Record], entry: FileEntry) -> None:
    """Compare the store with what was to be saved. The system is asked to forget its copy first."""
    if isinstance(folder, LocalStore) and hasattr(os, "posix_fadvise"):  # Linux
        with (folder.path / name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pieces = [piece for record in records.values() for piece in record.pieces]
    found = file_faults(folder, name, entry, pieces)
    if found:
        raise OSError(f"{folder.at(name)} does not read back as it was written: {found[0]}")
    passed(SaveMoment.SHARD_VERIFIED)
