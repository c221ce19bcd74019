"""Coverage of a record by its pieces: gaps, and shared elements. Pure, without torch.

A block is (start, shape): its first index and its extent along every dimension of the record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kenotron_ckpt.records import Piece, Record, Shape


def merge_records(shares: Sequence[Mapping[str, Record]]) -> dict[str, Record]:
    """Put together what the ranks wrote, sorted by name; the ranks' shares in rank order.

    Raises ValueError when ranks disagree about a record's shape or dtype, or when the pieces of a
    record do not cover it exactly once.
    """
    merged: dict[str, Record] = {}
    for rank, share in enumerate(shares):
        for name, record in share.items():
            known = merged.setdefault(name, Record(record.shape, record.dtype))
            if (known.shape, known.dtype) != (record.shape, record.dtype):
                raise ValueError(
                    f"{name}: rank {rank} has {record.dtype} {list(record.shape)}, a lower rank "
                    f"has {known.dtype} {list(known.shape)}: one name, one logical tensor"
                )
            merged[name] = Record(known.shape, known.dtype, (*known.pieces, *record.pieces))
    for name, record in merged.items():
        check_coverage(name, record)
    return dict(sorted(merged.items()))


def check_coverage(name: str, record: Record) -> None:
    """Raise ValueError, naming the record, unless its pieces cover its shape exactly once."""
    shape, pieces = record.shape, record.pieces
    for piece in pieces:
        if not _inside(shape, piece):
            raise ValueError(f"{name}: piece {_say(piece)} is not within shape {list(shape)}")
    twice = _overlapping(shape, pieces)
    if twice:
        first, second = twice
        raise ValueError(
            f"{name}: pieces {_say(first)} and {_say(second)} hold the same elements; "
            "the ranks' layouts contradict one another"
        )
    held = sum(math.prod(piece.shape) for piece in pieces)
    if held != record.numel:
        index = first_missing(shape, [(piece.start, piece.shape) for piece in pieces])
        raise ValueError(
            f"{name}: {record.numel - held} of the {record.numel} elements of shape {list(shape)} "
            f"were given by no rank, first at index {list(index or ())}"
        )


def overlap(a: tuple[Shape, Shape], b: tuple[Shape, Shape]) -> tuple[Shape, Shape] | None:
    """(start, shape) of what two (start, shape) blocks share; None when that is nothing."""
    start = tuple(map(max, a[0], b[0]))
    ends = [min(i + m, j + n) for i, m, j, n in zip(a[0], a[1], b[0], b[1], strict=True)]
    shape = tuple(end - begin for end, begin in zip(ends, start, strict=True))
    return (start, shape) if all(size > 0 for size in shape) else None


def first_missing(shape: Shape, blocks: Sequence[tuple[Shape, Shape]]) -> Shape | None:
    """First index of ``shape``, in row-major order, that is in no (start, shape) block."""
    if not shape:
        return None if blocks else ()
    cuts = {0} | {s[0] for s, _ in blocks} | {s[0] + e[0] for s, e in blocks}
    for low in sorted(cut for cut in cuts if 0 <= cut < shape[0]):
        inside = [(s[1:], e[1:]) for s, e in blocks if s[0] <= low < s[0] + e[0]]
        rest = first_missing(shape[1:], inside)
        if rest is not None:
            return (low, *rest)
    return None


def _inside(shape: Shape, piece: Piece) -> bool:
    if not len(piece.start) == len(piece.shape) == len(shape):
        return False
    places = zip(piece.start, piece.shape, shape, strict=True)
    return all(0 <= first and 0 < size <= whole - first for first, size, whole in places)


def _overlapping(shape: Shape, pieces: Sequence[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces that share an element: a sweep along the dimension with the most cuts."""
    if not shape:
        return (pieces[0], pieces[1]) if len(pieces) > 1 else None
    dim = max(range(len(shape)), key=lambda d: len({piece.start[d] for piece in pieces}))
    live: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start[dim]):
        live = [p for p in live if p.start[dim] + p.shape[dim] > piece.start[dim]]
        for other in live:
            if overlap((other.start, other.shape), (piece.start, piece.shape)):
                return other, piece
        live.append(piece)
    return None


def _say(piece: Piece) -> str:
    return f"{piece.file}:{piece.key} {list(piece.shape)}"
