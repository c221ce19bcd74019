"""The manifest: which file holds which block of which logical tensor. Pure, without torch.

A *record* is one logical tensor, cut in *pieces*: rectangular blocks that cover it exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = "kenotron-checkpoint"
VERSION = 1

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One block of a record and where it is stored."""

    file: str
    """Name of a file beside the manifest."""
    key: str
    """Name of the block in that file."""
    start: Shape
    """First index of the block in the logical tensor, per dimension."""
    shape: Shape
    """Elements along each dimension."""


@dataclass(frozen=True)
class Record:
    """One logical tensor."""

    shape: Shape
    """Global shape."""
    dtype: str
    """Name of the torch dtype (``bfloat16``)."""
    pieces: tuple[Piece, ...] = ()

    @property
    def numel(self) -> int:
        """Elements in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileEntry:
    """What a file must be, byte for byte."""

    bytes: int
    """Length of the file."""
    sha256: str
    """SHA-256 of the whole file in hexadecimal, as ``sha256sum`` prints it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All there is to know about a checkpoint without opening its files."""

    step: int
    """Training steps done."""
    mesh: Mapping[str, int]
    """Sizes of the axes of the mesh that wrote it; a reader does not need them."""
    records: Mapping[str, Record]
    """By logical name."""
    files: Mapping[str, FileEntry]
    """By name."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the program saved beside the tensors (JSON)."""
    config: str | None = None
    """Text of ``config.yaml``."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions that wrote it."""

    def unused(self, names: Iterable[str]) -> list[str]:
        """Records that are not among ``names``, sorted: what a reader of ``names`` leaves."""
        return sorted(set(self.records) - set(names))

    def to_json(self) -> str:
        """The text of ``manifest.json``: a line for each file and each record."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        entries = {"files": _lines(data.pop("files")), "records": _lines(data.pop("records"))}
        texts = {key: json.dumps(value) for key, value in data.items()} | entries
        return "{\n" + ",\n".join(f'"{key}": {text}' for key, text in texts.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the text of ``manifest.json``.

        Raises ValueError when it is not JSON, not a manifest, of a version this package does not
        read, or incomplete.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"manifest.json is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"manifest.json is not a {FORMAT!r}: its 'format' does not say so")
        if data.get("version") != VERSION:
            raise ValueError(
                f"manifest.json has format version {data.get('version')!r}, but this kenotron-ckpt "
                f"reads version {VERSION}: install the release that wrote it, or a newer one"
            )
        try:
            return cls(
                step=int(data["step"]),
                mesh=dict(data["mesh"]),
                records=records_from_json(data["records"]),
                files={name: FileEntry(**entry) for name, entry in data["files"].items()},
                state=dict(data["state"]),
                config=data["config"],
                libraries=dict(data["libraries"]),
            )._checked()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"manifest.json is damaged: {error!r}") from None

    def _checked(self) -> Manifest:
        """Every file is listed, and lies beside the manifest."""
        for name, record in self.records.items():
            unlisted = {piece.file for piece in record.pieces} - set(self.files)
            if unlisted:
                raise ValueError(f"manifest.json is damaged: {name} is in unlisted {unlisted}")
        outside = [name for name in self.files if "/" in name or "\\" in name]
        if outside:
            raise ValueError(f"manifest.json is damaged: files outside its folder: {outside}")
        return self


def records_from_json(data: Mapping[str, Any]) -> dict[str, Record]:
    """Records by name from what ``asdict`` made of them. Raises KeyError or TypeError."""
    return {
        name: Record(
            tuple(entry["shape"]),
            str(entry["dtype"]),
            tuple(
                Piece(p["file"], p["key"], tuple(p["start"]), tuple(p["shape"]))
                for p in entry["pieces"]
            ),
        )
        for name, entry in data.items()
    }


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


def _lines(entries: Mapping[str, Any]) -> str:
    """A JSON object with a line for each entry."""
    lines = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}"


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
