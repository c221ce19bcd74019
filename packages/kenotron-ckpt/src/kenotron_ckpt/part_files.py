"""Parts: the safetensors files that a rank's share becomes, laid out before a byte is copied.

A part's header needs only shapes and dtypes. So the copy of its blocks in host memory can already
lie as the file will: the header, then one run of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from kenotron_ckpt.blocks import OwnBlock, Tensors, dtype_name
from kenotron_ckpt.index import FileEntry, Piece, Record

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes that can be stored, in safetensors."""


@dataclass(frozen=True, eq=False)
class PartFile:
    """One file to be written."""

    suffix: str
    """End of the file's name: empty for the first part, ``.part1`` for the second, ..."""
    blocks: Sequence[OwnBlock]
    """In the order of the file."""
    offsets: Sequence[int]
    """First byte of each block after the header."""
    header: bytes
    """Its length in 8 bytes, little end first, then JSON."""
    nbytes: int
    """Bytes after the header."""

    def records(self, file: str, checksums: Sequence[str]) -> dict[str, Record]:
        """The manifest's entries of the blocks, by record, once the file is written."""
        found: dict[str, Record] = {}
        places = zip(self.blocks, self.offsets, checksums, strict=True)
        for block, offset, checksum in places:
            box, begin = block.box, len(self.header) + offset
            piece = Piece(file, block.key, box.start, box.shape, begin, block.nbytes, checksum)
            known = found.get(block.name)
            pieces = () if known is None else known.pieces
            dtype = dtype_name(block.view.dtype)
            found[block.name] = Record(block.layout.shape, dtype, (*pieces, piece))
        return found

    def entry(self) -> FileEntry:
        """The manifest's entry of the file."""
        return FileEntry(len(self.header) + self.nbytes, xxh3_64_hexdigest(self.header))


def unstorable(tensors: Tensors) -> list[str]:
    """One sentence for every tensor whose dtype safetensors does not know."""
    return [
        f"{key}: dtype {dtype_name(tensor.dtype)} cannot be stored; choose one of "
        + ", ".join(map(dtype_name, CODES))
        for key, (tensor, _) in sorted(tensors.items())
        if tensor.dtype not in CODES
    ]


def plan_parts(blocks: Sequence[OwnBlock], limit: int, first: int = 0) -> list[PartFile]:
    """The files for blocks, numbered from ``first``; each gets at most ``limit`` bytes of data, or
    a single block.
    """
    batches: list[list[OwnBlock]] = []
    room = 0
    for block in blocks:
        if not batches or block.nbytes > room:
            batches.append([])
            room = limit
        batches[-1].append(block)
        room -= block.nbytes
    return [_part(number, batch) for number, batch in enumerate(batches, first)]


def _part(number: int, blocks: Sequence[OwnBlock]) -> PartFile:
    # Wide elements first: then every block begins at a multiple of its element size.
    ordered = sorted(blocks, key=lambda block: -block.view.element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = [], 0
    for block in ordered:
        offsets.append(end)
        end += block.nbytes
        header[block.key] = {
            "dtype": CODES[block.view.dtype],
            "shape": block.box.shape,
            "data_offsets": [offsets[-1], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    suffix = f".part{number}" if number else ""
    return PartFile(suffix, ordered, offsets, len(text).to_bytes(8, "little") + text, end)
