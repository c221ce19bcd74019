"""Ordinary safetensors files of whole tensors: their header read, and one written in a stream."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt.blocks import dtype_name
from kenotron_ckpt.part_files import CODES
from kenotron_ckpt.records import Shape
from kenotron_ckpt.writer import as_bytes

METADATA = "__metadata__"
_DTYPES = {code: dtype for dtype, code in CODES.items()}
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class TensorSize:
    """Shape and dtype of a tensor that is still to come."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """Position of a whole tensor in a file."""

    file: str
    """Name of the file."""
    shape: Shape
    dtype: torch.dtype
    offset: int
    """First byte of its values in the file."""


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name; values are not read.

    Raises ValueError, naming the file and the rule that it breaks; OSError.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _LONGEST_HEADER else b""
    try:
        header = json.loads(text)
        header.pop(METADATA, None)
        entries = dict(header)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: its header cannot be read as JSON ({error}): it is no safetensors file, or "
            "was cut off"
        ) from None
    room = path.stat().st_size - 8 - length
    return {name: _stored(path, name, each, 8 + length, room) for name, each in entries.items()}


def write_safetensors(
    path: Path, sizes: Mapping[str, TensorSize], values: Iterable[Tensor]
) -> None:
    """Write a safetensors file, one tensor at a time in memory; it is on the disk on return.

    Args:
        path: the file.
        sizes: its tensors.
        values: their values on the CPU, in that order, asked for one by one, each of
            its shape in ``sizes``.

    Raises:
        ValueError: a value has another size than ``sizes`` gives.
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        header[name] = {
            "dtype": CODES[size.dtype],
            "shape": size.shape,
            "data_offsets": [end, end := end + size.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        made = iter(values)
        for name, size in sizes.items():
            value = next(made)  # zip would keep it while the next one is made
            if tuple(value.shape) != size.shape or value.dtype != size.dtype:
                raise ValueError(
                    f"{path}: {name} is {value.dtype} {list(value.shape)}; its header says "
                    f"{size.dtype} {list(size.shape)}"
                )
            file.write(as_bytes(host := value.contiguous()))
            del value, host  # before the next one is made
        file.flush()
        os.fsync(file.fileno())


def _stored(path: Path, name: str, entry: Any, begin: int, room: int) -> Stored:
    try:
        code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, first, last]
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("sizes are whole numbers from 0")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: its header is damaged at {name}: {error!r}") from None
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ValueError(
            f"{path}: {name} has dtype {code}; only {', '.join(map(dtype_name, CODES))} can be read"
        )
    if last - first != math.prod(shape) * dtype.itemsize or last > room:
        raise ValueError(
            f"{path}: {name}, {code} {list(shape)} at bytes {first} to {last} of {room}, does not "
            "fit: the file was cut off, or its header is damaged"
        )
    return Stored(path.name, shape, dtype, begin + first)
