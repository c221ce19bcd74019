"""Differences between two checkpoints: records, values, state, config.

One record of each is in memory.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt.folder import preferred
from kenotron_ckpt.index import Manifest
from kenotron_ckpt.reader import read_record
from kenotron_ckpt.store import Location, Store

_CHUNK = 1 << 22
"""Elements compared at a time: what is made of them is several times as large."""
_ABSENT = object()


@dataclass(frozen=True)
class Distance:
    """Distance between the values of two tensors of one shape."""

    bitwise: bool
    """The same dtype and the same bits."""
    unequal: int
    """Elements whose values differ; NaN equals NaN, and 0 equals -0."""
    largest: float
    """max |a - b|; NaN where one of the two is NaN."""


def differences(a: Location, b: Location) -> Iterator[str]:
    """Sentences on what differs between two checkpoints, as it is found; none when nothing does.

    The mesh, the cut and the libraries that wrote them do not count. Checksums are not compared:
    see ``verify_files``.

    Args:
        a, b: step folders, or run folders (their latest complete checkpoints).

    Raises:
        ValueError: there is no checkpoint.
        OSError: a file cannot be read.
    """
    (left, first), (right, second) = preferred(a), preferred(b)
    if first.step != second.step:
        yield f"step: {first.step} in A, {second.step} in B"
    for name in sorted({*first.records, *second.records}):
        if name not in second.records:
            yield f"{name}: only in A"
        elif name not in first.records:
            yield f"{name}: only in B"
        else:
            yield from _of_record(name, (left, right), (first, second))
    yield from of_values("state", first.state, second.state)
    if dict(first.mesh) == dict(second.mesh):  # else they are of no use on the other
        yield from of_values("rank_states", list(first.rank_states), list(second.rank_states))
    yield from _of_texts(first.config, second.config)


def distance(a: Tensor, b: Tensor) -> Distance:
    """Compare two CPU tensors of one shape, of any dtypes: values are promoted as torch does."""
    bitwise, unequal, largest = a.dtype == b.dtype, 0, 0.0
    flat_a, flat_b = a.contiguous().view(-1), b.contiguous().view(-1)
    for begin in range(0, a.numel(), _CHUNK):
        x, y = flat_a[begin : begin + _CHUNK], flat_b[begin : begin + _CHUNK]
        if a.dtype == b.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        bitwise = False
        other = (x != y) & ~(x.isnan() & y.isnan())
        if count := int(other.sum()):
            unequal += count
            apart = float((x[other].double() - y[other].double()).abs().max())
            largest = math.nan if math.isnan(largest) else max(apart, largest)
    return Distance(bitwise, unequal, largest)


def of_values(where: str, a: Any, b: Any) -> Iterator[str]:
    """Sentences on where two JSON values differ, by their path."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            yield from of_values(f"{where}.{key}", a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from of_values(f"{where}.{index}", one, other)
    elif a is _ABSENT:
        yield f"{where}: {b!r}, only in B"
    elif b is _ABSENT:
        yield f"{where}: {a!r}, only in A"
    elif type(a) is not type(b) or (a != b and not (a != a and b != b)):  # NaN is not itself
        yield f"{where}: {a!r} in A, {b!r} in B"


def _of_record(
    name: str, folders: Sequence[Store], both: tuple[Manifest, Manifest]
) -> Iterator[str]:
    a, b = (manifest.records[name] for manifest in both)
    if a.shape != b.shape:
        yield f"{name}: shape {list(a.shape)} in A, {list(b.shape)} in B"
    if a.dtype != b.dtype:
        yield f"{name}: {a.dtype} in A, {b.dtype} in B"
    if a.shape == b.shape:
        found = distance(*(read_record(f, m, name) for f, m in zip(folders, both, strict=True)))
        if found.unequal:
            yield (
                f"{name}: {found.unequal:,} of {a.numel:,} elements differ, "
                f"max |A - B| = {found.largest:.6g}"
            )
        elif not found.bitwise and a.dtype == b.dtype:
            yield f"{name}: equal in value, not bit for bit (signs of zeros, or kinds of NaN)"


def _of_texts(a: str | None, b: str | None) -> Iterator[str]:
    if a == b:
        return
    if a is None or b is None:
        yield f"config: only in {'B' if a is None else 'A'}"
        return
    for line in difflib.unified_diff(a.splitlines(), b.splitlines(), n=0, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            yield f"config: {'A' if line[0] == '-' else 'B'} has: {line[1:].strip()}"
