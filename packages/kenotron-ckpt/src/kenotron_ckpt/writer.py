"""Blocks to safetensors files: streamed, hashed on the way, on the disk when it returns.

The file is written here rather than by the safetensors library: its header needs only shapes, so
that one block at a time leaves the device, and the bytes are hashed without reading them again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kenotron_ckpt.cut import Block, Tensors, dtype_name
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
"""What safetensors calls the dtypes that can be stored."""

Share = tuple[dict[str, Record], dict[str, FileEntry]]
"""What one rank wrote: its pieces of the records, and its files."""


def unstorable(tensors: Tensors) -> list[str]:
    """One sentence for every tensor whose dtype safetensors does not know."""
    return [
        f"{key}: dtype {dtype_name(tensor.dtype)} cannot be stored; choose one of "
        + ", ".join(map(dtype_name, CODES))
        for key, (tensor, _) in sorted(tensors.items())
        if tensor.dtype not in CODES
    ]


def write_blocks(folder: Path, stem: str, blocks: Sequence[Block], limit: int) -> Share:
    """Write blocks to ``<stem>.safetensors``, ``<stem>.part1.safetensors``, ...

    A file gets no more than ``limit`` bytes of data, unless one block alone has more. No blocks,
    no file. Raises OSError.
    """
    records: dict[str, Record] = {}
    files: dict[str, FileEntry] = {}
    for number, batch in enumerate(_batches(blocks, limit)):
        name = f"{stem}.part{number}.safetensors" if number else f"{stem}.safetensors"
        keys = [f"{block.name}@{','.join(map(str, block.box.start))}" for block in batch]
        files[name] = _write(folder / name, dict(zip(keys, batch, strict=True)))
        for key, block in zip(keys, batch, strict=True):
            known = records.get(block.name) or empty_record(block)
            piece = Piece(name, key, block.box.start, block.box.shape)
            records[block.name] = Record(known.shape, known.dtype, (*known.pieces, piece))
    return records, files


def empty_record(block: Block) -> Record:
    """The block's record without any piece."""
    return Record(block.layout.shape, dtype_name(block.view.dtype))


def _batches(blocks: Sequence[Block], limit: int) -> list[list[Block]]:
    batches: list[list[Block]] = []
    room = 0
    for block in blocks:
        if not batches or block.nbytes > room:
            batches.append([])
            room = limit
        batches[-1].append(block)
        room -= block.nbytes
    return batches


def _write(path: Path, blocks: dict[str, Block]) -> FileEntry:
    """One file: 8 bytes of header length, JSON header, data."""
    # Wide elements first: then every block begins at a multiple of its element size.
    ordered = sorted(blocks.items(), key=lambda item: -item[1].view.element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, block in ordered:
        begin, end = end, end + block.nbytes
        header[key] = {
            "dtype": CODES[block.view.dtype],
            "shape": block.box.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            digest.update(part)
        for _, block in ordered:
            host = block.view.detach().cpu().contiguous()
            data = memoryview((ctypes.c_ubyte * block.nbytes).from_address(host.data_ptr()))
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(8 + len(text) + end, digest.hexdigest())
