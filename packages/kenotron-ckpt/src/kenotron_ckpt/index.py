"""The manifest: which file holds which block of which logical tensor. Pure, without torch.

A *record* is one logical tensor, cut in *pieces*: rectangular blocks that cover it exactly once.
Every byte of a checkpoint is under a checksum (XXH3, 64 bits, in hexadecimal): the bytes of a piece
under the piece's, the header of a file under the file's, the text of the manifest under its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_hexdigest

from kenotron_ckpt.coverage import check_coverage
from kenotron_ckpt.manifest_rules import check_manifest
from kenotron_ckpt.records import FileEntry, Piece, Record

FORMAT = "kenotron-checkpoint"
VERSION = 3
"""Of what is written."""
OLDEST = 2
"""Of what is read."""
MIN_READER = 2
"""The oldest version of readers that understand what is written: others refuse it."""

_SEAL = ',\n"checksum": "'
"""Text before the checksum of the manifest, which is of all bytes before this."""


class UnknownVersion(ValueError):
    """A manifest of a format that this package does not read; it need not be damaged."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All there is to know about a checkpoint without opening its files."""

    step: int
    """Training steps done."""
    mesh: Mapping[str, int]
    """Sizes of the axes of the mesh that wrote it; a reader does not need them."""
    generation: int = 0
    """Start of the run that saved it (``Generation``); 0: the folder was not locked."""
    records: Mapping[str, Record]
    """By logical name."""
    files: Mapping[str, FileEntry]
    """By name."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """State that the program saved next to the tensors (JSON)."""
    rank_states: Sequence[Any] = ()
    """State that each rank saved of its own, by rank (JSON): of use on the same mesh only."""
    config: str | None = None
    """Text of ``config.yaml``."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions that wrote it."""

    def unused(self, names: Iterable[str]) -> list[str]:
        """Records that are not among ``names``, sorted: what a reader of ``names`` leaves."""
        return sorted(set(self.records) - set(names))

    def to_json(self) -> str:
        """The text of ``manifest.json``: a line for each file and each record."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "min_reader": MIN_READER}
        data |= vars(self)
        files = {name: vars(entry) for name, entry in data.pop("files").items()}
        entries = {"files": _lines(files), "records": _lines(records_to_json(data.pop("records")))}
        texts = {key: json.dumps(value) for key, value in data.items()} | entries
        body = "{\n" + ",\n".join(f'"{key}": {text}' for key, text in texts.items())
        return f'{body}{_SEAL}{xxh3_64_hexdigest(body.encode())}"\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the text of ``manifest.json``.

        Raises:
            UnknownVersion: it is of a version that this package does not read.
            ValueError: it is not JSON, not a manifest, incomplete, not what was written, or says
                what no manifest can.
        """
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("manifest.json is damaged: its JSON is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"manifest.json is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"manifest.json is not a {FORMAT!r}: its 'format' does not say so")
        _check_version_and_seal(data, text)
        try:
            check_manifest(data, newer=data["version"] > VERSION)
            found = cls(
                step=data["step"],
                mesh=data["mesh"],
                generation=data.get("generation", 0),
                records=records_from_json(data["records"]),
                files={
                    name: FileEntry(entry["bytes"], entry["header"])
                    for name, entry in data["files"].items()
                },
                state=data["state"],
                rank_states=tuple(data["rank_states"]),
                config=data["config"],
                libraries=data["libraries"],
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"manifest.json is damaged: {error!r}") from None
        for name, record in found.records.items():
            _check_record(name, record)
        return found


def _check_version_and_seal(data: Mapping[str, Any], text: str) -> None:
    """Raise ValueError for damage, and UnknownVersion, another message, for another version.

    Every version ends with the checksum of its text, so a changed byte in the number of the version
    is damage. A text without any checksum line is judged by its version alone.
    """
    version: Any = data.get("version")
    least: Any = data.get("min_reader", version)
    body, seal, _ = text.rpartition(_SEAL)
    is_whole = bool(seal) and seal_of(text) == xxh3_64_hexdigest(body.encode())
    if is_whole or not seal:
        for number in (version, least):
            if type(number) is not int or number < 1:
                raise ValueError(f"manifest.json is damaged: its version is {number!r}")
        if version < OLDEST or least > VERSION:
            age, cure = "too old", "the release that wrote it"
            if least > VERSION:
                age, cure = "too new", f"a newer release, one that reads version {least}"
            raise UnknownVersion(
                f"the format is {age}, not damaged: manifest.json has format version {version}, "
                f"but this kenotron-ckpt reads versions {OLDEST} to {VERSION}: install {cure}"
            )
    if not is_whole:
        known = version in range(OLDEST, VERSION + 1)
        other = "" if known else f"; it says version {version!r}, here {VERSION} is read"
        raise ValueError(
            "manifest.json is damaged or was edited: its text does not have the checksum at its "
            f"end{other}"
        )


def _check_record(name: str, record: Record) -> None:
    """Raise ValueError unless the pieces are whole, and cover the record exactly once."""
    if len(record.pieces) == 1 and record.numel and record.pieces[0].shape == record.shape:
        if not any(record.pieces[0].start):
            return  # most are one piece: all of it
    try:
        check_coverage(name, record)
    except ValueError as error:
        raise ValueError(f"manifest.json is damaged: {error}") from None


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
