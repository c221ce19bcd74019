"""One tensor file of a Nanotron checkpoint: its name, its header, the slices that it holds.

Two containers, one layout: 8 bytes of header length (little end first), a JSON header that names a
tensor ``data``, then bytes. ``.safetensors`` keeps what is said of the cut under ``__metadata__``;
``.datastates`` keeps it next to dtype and shape, and ends with a pickle that is never opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Block = tuple[Shape, Shape]
"""(first index, extent) along every dimension."""
Pair = tuple[Block, Block]
"""Place of a block in the file's tensor, and in the whole one."""

SUFFIXES = (".safetensors", ".datastates")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "torch.float64": torch.float64,
    "torch.float32": torch.float32,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
}
"""Dtypes of parameters, by their names in the two containers."""
PAIRS, WHOLE, VERSION = "local_global_slices_pairs", "unsharded_shape", "version"
CUT = {PAIRS, WHOLE, VERSION}
"""Keys of a tensor that was cut."""

_TURNED = ("experts", "mlp", "w1", "module")
_LONGEST_HEADER = 100 << 20
_NAME = re.compile(
    r"model_(?P<name>.+?)"
    r"(?:_pp-rank-(?P<pp>\d+)-of-(?P<PP>\d+)_tp-rank-(?P<tp>\d+)-of-(?P<TP>\d+)"
    r"(?:_exp-rank-(?P<exp>\d+)-of-(?P<EXP>\d+))?)?"
    r"\.(?:safetensors|datastates)"
)
_SIZE = re.compile(r"np\.u?int\d+\((\d+)\)|(\d+)")


@dataclass(frozen=True)
class Place:
    """Contents of the name of a tensor file."""

    name: str
    """Last part of the tensor's name (``weight``)."""
    ranks: tuple[tuple[str, int, int], ...] = ()
    """(axis, rank, size) for pp and tp, and exp where experts are cut; empty: not cut at all."""

    def rank(self, axis: str) -> int:
        """Rank on an axis; 0 where the name does not say."""
        return next((rank for name, rank, _ in self.ranks if name == axis), 0)

    def size(self, axis: str) -> int:
        """Size of an axis; 1 where the name does not say."""
        return next((size for name, _, size in self.ranks if name == axis), 1)


@dataclass(frozen=True)
class ShardFile:
    """One tensor file, without its values."""

    path: Path
    place: Place
    dtype: torch.dtype
    shape: Shape
    """Of the part, the tensor in the file."""
    offset: int
    """First byte of its values in the file."""
    whole: Shape
    """Of the tensor that it is a part of."""
    pairs: tuple[Pair, ...]
    """The blocks that it holds, which cover it exactly once."""
    version: str | None
    """Version of the format; None when the tensor is not cut, and the file does not say."""
    transposed: bool = False
    """The file has the transpose of the tensor (LlaMoE's first matrices of one tp rank)."""

    def arrange(self, values: Tensor) -> Tensor:
        """Return this part, of shape ``shape``, from its elements in the order of the file."""
        return values.view(self.shape[::-1]).t() if self.transposed else values.view(self.shape)

    def read(self) -> Tensor:
        """The file's tensor, of ``shape``, on the CPU. Raises OSError when it cannot be read."""
        values = torch.empty(math.prod(self.shape), dtype=self.dtype)
        view = memoryview(values.view(-1).view(torch.uint8).numpy().data)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            while view and (got := file.readinto(view)):
                view = view[got:]
        if view:
            raise OSError(f"{self.path} ends within its tensor: it was cut off just now")
        return self.arrange(values)


def place_of(path: Path) -> Place:
    """Read the name of a tensor file. Raises ValueError when it is none of Nanotron's."""
    found = _NAME.fullmatch(path.name)
    if not found or ".safetensors" in found["name"]:
        raise ValueError(
            f"{path} is not named as a tensor of Nanotron is (model_<name>_pp-rank-P-of-PP_"
            "tp-rank-T-of-TP.safetensors, or model_<name>.safetensors); before version 1.4 "
            "some names were doubled: Nanotron's scripts/fix_checkpoint_bad_naming.py mends them"
        )
    ranks = tuple(
        (axis, int(found[axis]), int(found[axis.upper()]))
        for axis in ("pp", "tp", "exp")
        if found[axis] is not None
    )
    for axis, rank, size in ranks:
        if rank >= size:
            raise ValueError(
                f"{path}: its name says {axis} rank {rank} of {size}: ranks count from 0"
            )
    return Place(found["name"], ranks)


def open_shard(path: Path) -> ShardFile:
    """Read the name and the header of a tensor file.

    Raises ValueError, naming the file and the rule that it breaks; OSError.
    """
    place = place_of(path)
    entry, said, begin = _entry(path)
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{path}: dtype {entry['dtype']!r} is not one of {', '.join(DTYPES)}")
    shape = tuple(entry["shape"])
    first, last = entry["data_offsets"]
    room = path.stat().st_size - begin
    if last - first != math.prod(shape) * dtype.itemsize or not 0 <= first <= last <= room:
        raise ValueError(
            f"{path}: {dtype} {list(shape)} at bytes {first} to {last} of {room} does not fit: the "
            "file was cut off, or its header is damaged"
        )
    lacking = sorted(CUT - set(said))
    if place.ranks and lacking:
        raise ValueError(
            f"{path}: a part of a tensor says which by its metadata, but {', '.join(lacking)} "
            f"is not there, only {sorted(said) or 'nothing'}"
        )
    if WHOLE not in said or PAIRS not in said:  # not cut
        everything = ((0,) * len(shape), shape)
        return ShardFile(
            path, place, dtype, shape, begin + first, shape, ((everything, everything),),
            said.get(VERSION),
        )  # fmt: skip
    whole = read_shape(said[WHOLE], f"{path}: {WHOLE}")
    if transposed := is_transposed(path, place, shape, whole):
        shape = shape[::-1]
    pairs = read_pairs(said[PAIRS], shape, whole, f"{path}: {PAIRS}")
    return ShardFile(
        path, place, dtype, shape, begin + first, whole, pairs, said[VERSION], transposed
    )


def is_transposed(path: Path, place: Place, shape: Shape, whole: Shape) -> bool:
    """Return whether a file holds the transpose of what its metadata describes.

    Nanotron transposes the first matrices of LlaMoE's experts after it has written down how they
    are cut, where there is one tp rank.

    Args:
        path: the file; its folder tells which tensor it is.
        place: what its name says.
        shape: shape of the tensor in the file.
        whole: shape of the whole tensor in the metadata.

    Raises:
        ValueError: both readings fit.
    """
    if path.parent.parts[-len(_TURNED) :] != _TURNED or place.size("tp") > 1:
        return False
    if len(shape) != 2 or len(whole) != 2 or shape[0] != whole[1]:
        return False
    if shape[0] == shape[1]:
        raise ValueError(
            f"{path}: its matrix is square ({list(shape)}), so its shape does not tell whether it "
            "was transposed, as Nanotron does with one tp rank; save it again there with tp 2"
        )
    return True


def _entry(path: Path) -> tuple[Mapping[str, Any], Mapping[str, str], int]:
    """Return the header's entries of ``data`` and of the cut, and the first byte after it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _LONGEST_HEADER else b""
    try:
        header = json.loads(text)
        said = header.pop("__metadata__", None) or {}
        header.pop("datastates_metadata", None)  # where a pickle lies that is not needed
        if set(header) != {"data"}:
            raise ValueError(f"it holds {sorted(header)}; a file has one tensor, called data")
        entry = header["data"]
        numbers = [*entry["shape"], *entry["data_offsets"]]
        if len(entry["data_offsets"]) != 2 or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"shape and data_offsets are not sizes: {entry}")
        return {**entry, "dtype": str(entry["dtype"])}, {**entry, **said}, 8 + length
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error!r}" if isinstance(error, KeyError | AttributeError) else error
        raise ValueError(f"{path}: its header cannot be read: {reason}") from None


def read_shape(text: str, where: str) -> Shape:
    """``(16, 64)``, or ``(np.int64(16), 64)`` as numpy 2 made it. Raises ValueError."""
    inside = text.strip().removeprefix("(").removesuffix(")")
    parts = [part.strip() for part in inside.split(",") if part.strip()]
    found = [_SIZE.fullmatch(part) for part in parts]
    if not text.strip().startswith("(") or not text.strip().endswith(")") or None in found:
        raise ValueError(f"{where} is {text!r}; it should be a tuple of sizes, as (16, 64)")
    return tuple(int(each[1] or each[2]) for each in found if each)


def read_pairs(text: str, shape: Shape, whole: Shape, where: str) -> tuple[Pair, ...]:
    """The blocks that a file holds, from ``0,8,None|None,None,None#0,8,None|None,None,None;...``.

    Args:
        text: of the metadata.
        shape: of the file's tensor.
        whole: shape of the whole one.
        where: beginning of errors.

    Raises:
        ValueError: the blocks do not lie in both tensors, or do not cover the file's exactly once.
    """
    pairs = []
    for pair in text.split(";"):
        sides = pair.split("#")
        if len(sides) != 2:
            raise ValueError(f"{where}: {pair!r} is not a local part, a # and a global part")
        local, far = _block(sides[0], shape, where), _block(sides[1], whole, where)
        if local[1] != far[1]:
            raise ValueError(
                f"{where}: {pair!r} pairs a block of {list(local[1])} with one of {list(far[1])}"
            )
        pairs.append((local, far))
    held = sum(math.prod(local[1]) for local, _ in pairs)
    if shared([local for local, _ in pairs]) or held != math.prod(shape):
        raise ValueError(
            f"{where}: {text!r} does not cover the file's tensor {list(shape)} exactly once"
        )
    return tuple(pairs)


def shared(blocks: list[Block]) -> tuple[int, int] | None:
    """Positions of the first two blocks with an element in common; None when there are none."""
    for second, (start, extent) in enumerate(blocks):
        for first in range(second):
            other, size = blocks[first]
            places = zip(start, extent, other, size, strict=True)
            if all(max(a, b) < min(a + m, b + n) for a, m, b, n in places):
                return first, second
    return None


def _block(text: str, shape: Shape, where: str) -> Block:
    """``0,8,None|None,None,None`` in a tensor of a shape."""
    start, extent = [], []
    slices = text.split("|") if text else []
    if len(slices) != len(shape):
        raise ValueError(f"{where}: {text!r} has {len(slices)} slices, the tensor is {list(shape)}")
    for part, size in zip(slices, shape, strict=True):
        values = part.split(",")
        if len(values) != 3 or not all(v == "None" or v.isdecimal() for v in values):
            raise ValueError(f"{where}: {part!r} is not start,stop,step of numbers and None")
        first, stop, step = (None if v == "None" else int(v) for v in values)
        first, stop = first or 0, size if stop is None else stop
        if step not in (None, 1):
            raise ValueError(
                f"{where}: {part!r} has step {step}; only blocks without gaps are known"
            )
        if not first <= stop <= size:
            raise ValueError(f"{where}: {part!r} is not within the {size} of shape {list(shape)}")
        start.append(first)
        extent.append(stop - first)
    return tuple(start), tuple(extent)
