"""The manifest: which file holds which block of which logical tensor. Pure, without torch.

A *record* is one logical tensor, cut in *pieces*: rectangular blocks that cover it exactly once.
Every byte of a checkpoint is under a checksum (XXH3, 64 bits, in hexadecimal): the bytes of a piece
under the piece's, the header of a file under the file's, the text of the manifest under its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_hexdigest

FORMAT = "kenotron-checkpoint"
VERSION = 2

Shape = tuple[int, ...]

_SEAL = ',\n"checksum": "'
"""What stands before the checksum of the text, which is of all before this."""


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
    offset: int = 0
    """First byte of the block in the file."""
    bytes: int = 0
    """How many bytes it has."""
    checksum: str = ""
    """Of the block's bytes."""


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
    header: str
    """Checksum of what stands before the first block: 8 bytes of length and that much JSON."""


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
    rank_states: Sequence[Any] = ()
    """What each rank saved of its own, by rank (JSON): of use on the same mesh only."""
    config: str | None = None
    """Text of ``config.yaml``."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions that wrote it."""

    def unused(self, names: Iterable[str]) -> list[str]:
        """Records that are not among ``names``, sorted: what a reader of ``names`` leaves."""
        return sorted(set(self.records) - set(names))

    def to_json(self) -> str:
        """The text of ``manifest.json``: a line for each file and each record."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, **vars(self)}
        files = {name: vars(entry) for name, entry in data.pop("files").items()}
        entries = {"files": _lines(files), "records": _lines(records_to_json(data.pop("records")))}
        texts = {key: json.dumps(value) for key, value in data.items()} | entries
        body = "{\n" + ",\n".join(f'"{key}": {text}' for key, text in texts.items())
        return f'{body}{_SEAL}{xxh3_64_hexdigest(body.encode())}"\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the text of ``manifest.json``.

        Raises ValueError when it is not JSON, not a manifest, of a version this package does not
        read, incomplete, or not what was written.
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
        body = text.rpartition(_SEAL)[0]
        if seal_of(text) != xxh3_64_hexdigest(body.encode()):
            raise ValueError(
                "manifest.json is damaged or was edited: its text does not have the checksum at "
                "its end"
            )
        try:
            return cls(
                step=int(data["step"]),
                mesh=dict(data["mesh"]),
                records=records_from_json(data["records"]),
                files={name: FileEntry(**entry) for name, entry in data["files"].items()},
                state=dict(data["state"]),
                rank_states=tuple(data["rank_states"]),
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


def seal_of(text: str) -> str:
    """The checksum at the end of a manifest's text: no two checkpoints have the same."""
    return text.rpartition(_SEAL)[2][:16]


def records_to_json(records: Mapping[str, Record]) -> dict[str, Any]:
    """Records as JSON values."""
    return {
        name: {"shape": r.shape, "dtype": r.dtype, "pieces": [vars(piece) for piece in r.pieces]}
        for name, r in records.items()
    }


def records_from_json(data: Mapping[str, Any]) -> dict[str, Record]:
    """Records by name from what ``records_to_json`` made of them. Raises KeyError or TypeError."""
    return {
        name: Record(
            tuple(entry["shape"]),
            str(entry["dtype"]),
            tuple(_piece(piece) for piece in entry["pieces"]),
        )
        for name, entry in data.items()
    }


def _piece(data: Mapping[str, Any]) -> Piece:
    start, shape = tuple(data["start"]), tuple(data["shape"])
    place, size = int(data["offset"]), int(data["bytes"])
    return Piece(data["file"], data["key"], start, shape, place, size, data["checksum"])


def _lines(entries: Mapping[str, Any]) -> str:
    """A JSON object with a line for each entry."""
    lines = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}"
