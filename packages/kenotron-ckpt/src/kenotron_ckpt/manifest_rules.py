"""Rules of a manifest: types, ranges and keys, checked before anything is made of its values.

A checksum shows damage, not forgery: everything that a reader relies on is checked here, but
for the coverage of records by their pieces (``coverage``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

WIDTHS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element, by the name of the torch dtype."""
_FLOATING = {name for name in WIDTHS if "float" in name}
_LARGEST = 2**63 - 1
_CHECKSUM = re.compile("[0-9a-f]{16}")
_RESERVED = {"", ".", "..", "manifest.json", "latest.txt", "config.yaml", "verified.txt"}
_KINDS = {
    "format": str, "version": int, "min_reader": int, "step": int, "generation": int,
    "mesh": dict, "records": dict, "files": dict, "state": dict, "rank_states": list,
    "config": (str, type(None)), "libraries": dict, "checksum": str,
}  # fmt: skip
_OPTIONAL = {"min_reader", "generation"}  # not in version 2, or not in its first release
_RECORD = {"shape", "dtype", "pieces"}
_PIECE = {"file", "key", "start", "shape", "offset", "bytes", "checksum"}
_FILE = {"bytes", "header"}


def is_floating(dtype: str) -> bool:
    """Return True for a dtype, by its name in torch, of floating-point numbers."""
    return dtype in _FLOATING


def check_manifest(data: Mapping[str, Any], *, newer: bool = False) -> None:
    """Check the values of a ``manifest.json``.

    Args:
        data: as JSON has them.
        newer: whether they are of a newer version, which may have more keys.

    Raises:
        ValueError: naming the key or record and the rule.
    """
    _keys("the manifest", data, _KINDS.keys() - _OPTIONAL, _KINDS.keys() if not newer else data)
    for key, kind in _KINDS.items():
        if key in data and (not isinstance(data[key], kind) or isinstance(data[key], bool)):
            _refuse(f"{key} is {_shown(data[key])}")
    _number("step", data["step"])
    _number("generation", data.get("generation", 0))
    for axis, size in data["mesh"].items():
        _number(f"mesh.{axis}", size, 1)
    for name, version in data["libraries"].items():
        _text(f"libraries.{name}", version)
    for name, entry in data["files"].items():
        _check_file(name, entry, newer)
    for name, entry in data["records"].items():
        _check_record(name, entry, data["files"], newer)


def _check_file(name: str, entry: Any, newer: bool) -> None:
    if "/" in name or "\\" in name or name in _RESERVED or not name.isprintable():
        _refuse(f"files outside its folder: {_shown(name)}")
    _keys(f"file {name}", entry, _FILE, _FILE if not newer else entry)
    _number(f"file {name}: bytes", entry["bytes"])
    _checksum(f"file {name}: header", entry["header"])


def _check_record(name: str, entry: Any, files: Mapping[str, Any], newer: bool) -> None:
    if not name or not name.isprintable():
        _refuse(f"{_shown(name)} is no name of a record")
    _keys(name, entry, _RECORD, _RECORD if not newer else entry)
    shape, dtype = entry["shape"], entry["dtype"]
    _sizes(f"{name}: shape", shape)
    if math.prod(shape) > _LARGEST:
        _refuse(f"{name}: shape {_shown(shape)} has more than {_LARGEST} elements")
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        _refuse(f"{name}: dtype {_shown(dtype)} is none of {', '.join(WIDTHS)}")
    if not isinstance(entry["pieces"], list):
        _refuse(f"{name}: pieces is {_shown(entry['pieces'])}")
    for piece in entry["pieces"]:
        _check_piece(name, piece, WIDTHS[dtype], files, newer)


def _check_piece(name: str, piece: Any, width: int, files: Mapping[str, Any], newer: bool) -> None:
    _keys(f"a piece of {name}", piece, _PIECE, _PIECE if not newer else piece)
    file, key, nbytes, offset = piece["file"], piece["key"], piece["bytes"], piece["offset"]
    if not isinstance(file, str) or file not in files:
        _refuse(f"{name} is in unlisted {_shown(file)}")
    _text(f"{name}: key", key)
    for part in ("start", "shape"):
        _sizes(f"{name}: {part} of a piece", piece[part])
    _number(f"{name}: bytes", nbytes)
    _number(f"{name}: offset", offset)
    _checksum(f"{name}: checksum", piece["checksum"])
    if nbytes != math.prod(piece["shape"]) * width:
        _refuse(f"{name}: a piece of shape {piece['shape']} does not have {nbytes} bytes")
    if offset + nbytes > files[file]["bytes"]:
        _refuse(f"{name}: bytes {offset} to {offset + nbytes} are beyond the end of {file}")


def _keys(what: str, entry: Any, needed: Iterable[str], known: Iterable[str]) -> None:
    if not isinstance(entry, dict):
        _refuse(f"{what} is {_shown(entry)}")
    if missing := sorted({*needed} - entry.keys()):
        _refuse(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(entry.keys() - {*known}):
        _refuse(f"{what} has unknown keys {', '.join(map(_shown, unknown))}")


def _sizes(what: str, sizes: Any) -> None:
    if not isinstance(sizes, list):
        _refuse(f"{what} is {_shown(sizes)}")
    for size in sizes:
        _number(what, size)


def _number(what: str, value: Any, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= _LARGEST:
        _refuse(f"{what} is {_shown(value)}, no whole number from {least} to {_LARGEST}")


def _text(what: str, value: Any) -> None:
    if not isinstance(value, str) or not value.isprintable():
        _refuse(f"{what} is {_shown(value)}")


def _checksum(what: str, value: Any) -> None:
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        _refuse(f"{what} is {_shown(value)}, no checksum of 16 digits")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"manifest.json is damaged: {text}")


def _shown(value: Any, show: Callable[[Any], str] = ascii) -> str:
    """Return a value as an error quotes it: short, and without control characters."""
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = type(value).__name__ if isinstance(value, dict | list) else show(value)
    return text if len(text) <= 60 else text[:60] + "..."
