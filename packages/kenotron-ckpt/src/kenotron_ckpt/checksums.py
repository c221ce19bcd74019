"""Whether the bytes of a file are those that were written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_hexdigest

from kenotron_ckpt.index import FileEntry, Manifest, Piece

CHUNK = 1 << 20
"""Bytes read at a time: they stay in the processor's cache until they are summed."""
_MOST_HEADER = 100 << 20
"""Limit of a header's length, the same as that of safetensors."""
_buffers = threading.local()


def manifest_faults(step_folder: Path, manifest: Manifest) -> list[str]:
    """One sentence for every file, and piece of one, whose bytes changed."""
    pieces = pieces_by_file(manifest)
    return [
        fault
        for name, entry in manifest.files.items()
        for fault in file_faults(step_folder / name, entry, pieces[name])
    ]


def pieces_by_file(manifest: Manifest) -> dict[str, list[Piece]]:
    """The pieces in every file, in the order of the records."""
    found: dict[str, list[Piece]] = {name: [] for name in manifest.files}
    for record in manifest.records.values():
        for piece in record.pieces:
            found[piece.file].append(piece)
    return found


def file_faults(path: Path, entry: FileEntry, pieces: Iterable[Piece]) -> list[str]:
    """One sentence for every way in which a file, or one of the pieces, is not what was written.

    A file that cannot be read has one fault: why. Only the header and the pieces are read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            fault = outer_fault(path, file.fileno(), entry)
            if fault:
                return [fault]
            return [
                piece_fault(path, piece)
                for piece in pieces
                if _sum(file.fileno(), piece) != piece.checksum
            ]
    except OSError as error:
        return [unreadable(path, error)]


def outer_fault(path: Path, handle: int, entry: FileEntry) -> str:
    """What is wrong with the length or the header of an open file; empty when both are right."""
    size = os.fstat(handle).st_size
    if size != entry.bytes:
        return f"{path.name} is {size} bytes long, but {entry.bytes} were written"
    if xxh3_64_hexdigest(_header(handle)) != entry.header:
        return f"{path.name}: its header is not what was written"
    return ""


def piece_fault(path: Path, piece: Piece) -> str:
    """Message for a piece whose checksum is another."""
    return f"{path.name}: the bytes of {piece.key} are not those that were written"


def unreadable(path: Path, error: OSError) -> str:
    """Message for a file that cannot be read."""
    missing = isinstance(error, FileNotFoundError)
    return f"{path.name} is missing" if missing else f"{path.name} cannot be read: {error}"


def _header(handle: int) -> bytes:
    length = os.pread(handle, 8, 0)
    size = int.from_bytes(length, "little")
    return length + os.pread(handle, size, 8) if size <= _MOST_HEADER else b""


def _sum(handle: int, piece: Piece) -> str:
    """The checksum of a piece as it lies in the file."""
    if not hasattr(_buffers, "view"):
        _buffers.view = memoryview(bytearray(CHUNK))
    whole = xxh3_64()
    place, end = piece.offset, piece.offset + piece.bytes
    while place < end:
        got = os.preadv(handle, [_buffers.view[: end - place]], place)
        if got == 0:  # the file ends here: not what was written
            break
        whole.update(_buffers.view[:got])
        place += got
    return whole.hexdigest()
