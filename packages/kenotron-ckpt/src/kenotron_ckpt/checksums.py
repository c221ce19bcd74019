"""Comparison of the bytes of a file with their checksums."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from xxhash import xxh3_64, xxh3_64_hexdigest

from kenotron_ckpt.index import FileEntry, Manifest, Piece
from kenotron_ckpt.store import Store, StoreFile

_MOST_HEADER = 100 << 20
"""Limit of a header's length, the same as that of safetensors."""
_buffers = threading.local()


def manifest_faults(store: Store, manifest: Manifest) -> list[str]:
    """One sentence for every file, and piece of one, whose bytes changed."""
    pieces = pieces_by_file(manifest)
    return [
        fault
        for name, entry in manifest.files.items()
        for fault in file_faults(store, name, entry, pieces[name])
    ]


def pieces_by_file(manifest: Manifest) -> dict[str, list[Piece]]:
    """The pieces in every file, in the order of the records."""
    found: dict[str, list[Piece]] = {name: [] for name in manifest.files}
    for record in manifest.records.values():
        for piece in record.pieces:
            found[piece.file].append(piece)
    return found


def file_faults(store: Store, name: str, entry: FileEntry, pieces: Iterable[Piece]) -> list[str]:
    """One sentence for every way in which a file, or one of the pieces, is not what was written.

    A file that cannot be read has one fault: why. Only the header and the pieces are read.
    """
    try:
        with store.open(name) as file:
            fault = outer_fault(name, file, entry)
            if fault:
                return [fault]
            return [
                piece_fault(name, piece) for piece in pieces if _sum(file, piece) != piece.checksum
            ]
    except OSError as error:
        return [unreadable(name, error)]


def outer_fault(name: str, file: StoreFile, entry: FileEntry) -> str:
    """Describe what is wrong with length or header of an open file; empty: both are right."""
    size = file.size()
    if size != entry.bytes:
        return f"{name} is {size} bytes long, but {entry.bytes} were written"
    if xxh3_64_hexdigest(_header(file)) != entry.header:
        return f"{name}: its header is not what was written"
    return ""


def piece_fault(name: str, piece: Piece) -> str:
    """Message for a piece whose checksum is another."""
    return f"{name}: the bytes of {piece.key} are not those that were written"


def unreadable(name: str, error: OSError) -> str:
    """Message for a file that cannot be read."""
    missing = isinstance(error, FileNotFoundError)
    return f"{name} is missing" if missing else f"{name} cannot be read: {error}"


def _header(file: StoreFile) -> bytes:
    length = file.read(0, 8)
    size = int.from_bytes(length, "little")
    return length + file.read(8, size) if size <= _MOST_HEADER else b""


def _sum(file: StoreFile, piece: Piece) -> str:
    """The checksum of a piece as it lies in the file."""
    if len(getattr(_buffers, "view", b"")) < file.chunk:
        _buffers.view = memoryview(bytearray(file.chunk))
    whole = xxh3_64()
    place, end = piece.offset, piece.offset + piece.bytes
    while place < end:
        got = file.read_into(_buffers.view[: min(file.chunk, end - place)], place)
        if got == 0:  # the file ends here: not what was written
            break
        whole.update(_buffers.view[:got])
        place += got
    return whole.hexdigest()
