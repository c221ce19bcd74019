"""One file of tokens, memory-mapped: datatrove's `.ds`, or a flat `.bin` with a note next to it.

`x.ds` holds nothing but ids, little-endian, 2 or 4 bytes each. `x.ds.index` holds where each
document ends, counted in tokens, as uint64. `x.ds.metadata` is text: `tokenizer|bytes`, the number
of tokens, the same number for people. A `.bin` has the same ids; `x.bin.json` may say the rest.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

TokenArray: TypeAlias = NDArray[np.uint16] | NDArray[np.uint32]
UInt64Array: TypeAlias = NDArray[np.uint64]

_TORCH_TYPES = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_UNKNOWN = "Unknown Tokenizer"
_DIGITS = 19
"""Digits of the number of tokens of a file, at most."""


@dataclass(frozen=True)
class TokenMetadata:
    """Metadata next to a file of tokens.

    Args:
        tokenizer: name or path of the tokenizer; empty if not known.
        token_bytes: bytes of one id, 2 or 4.
        tokens: number of ids in the file.
    """

    tokenizer: str
    token_bytes: int
    tokens: int

    def to_text(self) -> str:
        """Write the three lines of a `.ds.metadata`, as datatrove does."""
        named = self.tokenizer or f"{_UNKNOWN}|{self.token_bytes}"
        return f"{named}|{self.token_bytes}\n{self.tokens}\n{human_count(self.tokens)}"

    @classmethod
    def from_text(cls, text: str, place: str) -> "TokenMetadata":
        """Read the lines of a `.ds.metadata`; ValueError names `place` and the line."""
        lines = text.splitlines()
        tokenizer, bar, size = lines[0].rpartition("|") if lines else ("", "", "")
        if not bar or size not in ("2", "4"):
            raise ValueError(
                f"{place}: line 1 must be 'tokenizer|2' or 'tokenizer|4' (bytes of a token), but "
                f"it is {lines[0] if lines else ''!r}"
            )
        if len(lines) < 2 or not lines[1].isdecimal() or len(lines[1]) > _DIGITS:
            raise ValueError(
                f"{place}: line 2 must be the number of tokens, but it is "
                f"{lines[1][:_DIGITS] if len(lines) > 1 else ''!r}"
            )
        known = tokenizer != f"{_UNKNOWN}|{size}"
        return cls(tokenizer if known else "", int(size), int(lines[1]))


def human_count(tokens: int) -> str:
    """Write a number of tokens with three digits and a prefix: 1234567 is `1.23 MT`."""
    power = len(str(tokens)) - 1
    while True:
        text = f"{tokens / 10 ** (power // 3 * 3):.{2 - power % 3}f}"
        if float(text) < 10 ** (power % 3 + 1):
            prefix = ("", "k", "M", "G", "T", "P", "E")[power // 3]
            return f"{text} {prefix}T"
        power += 1  # rounding has made one more digit


class TokenFile:
    """Read the tokens and documents of one file; nothing is loaded until it is asked for.

    The file is mapped when its tokens are first read. The mapping holds no file descriptor, but a
    process may have only some 65,000 mappings: with `keep` False it lives as long as what was read.
    A copy made by pickle maps the file again.

    Args:
        path: a `.ds` or `.bin` file.
        token_bytes: bytes of an id, 2 or 4; None takes that of the file's metadata, or the
            index of its documents lets conclude.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, its size is no whole number of ids, or it contradicts its
            metadata or its index; the message names the file and the rule.
    """

    def __init__(self, path: str | os.PathLike[str], token_bytes: int | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self}: there is no such file of tokens")
        size = self.path.stat().st_size
        if size == 0:
            raise ValueError(f"{self}: the file is empty; a file of tokens holds at least one")
        metadata = read_metadata(self.path)
        self._documents, last = _read_index(self.path)
        self.token_bytes = _token_bytes(self, size, token_bytes, metadata, last)
        if size % self.token_bytes:
            raise ValueError(
                f"{self}: {size} bytes are no whole number of tokens of {self.token_bytes} bytes: "
                "the file is truncated, or its tokens have another size"
            )
        count = size // self.token_bytes
        if metadata and metadata.tokens != count:
            raise ValueError(
                f"{self}: the file holds {count} tokens, but its metadata says {metadata.tokens}: "
                "one of them is truncated or belongs to another file"
            )
        if self._documents is not None and last != count:
            raise ValueError(
                f"{self}: the file holds {count} tokens, but its index ends the last of "
                f"{self._documents} documents at {last}: one of them is truncated or belongs to "
                "another file"
            )
        self.tokenizer = metadata.tokenizer if metadata else ""
        self.keep = True
        self._count = count
        self._mapped: tuple[TokenArray | None, UInt64Array | None] = None, None

    def __str__(self) -> str:
        """Name the file."""
        return repr(str(self.path))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._count

    @property
    def dtype(self) -> np.dtype:
        """Kind of the ids; nothing is mapped."""
        return np.dtype(f"<u{self.token_bytes}")

    @property
    def tokens(self) -> TokenArray:
        """Return all ids, mapped read-only."""
        found, ends = self._mapped
        if found is None:
            found = map_integers(self.path, self.token_bytes, self._count)
            self._mapped = (found, ends) if self.keep else (None, None)
        return found

    @property
    def ends(self) -> UInt64Array | None:
        """Return where each document ends, mapped read-only; None where there is no index."""
        tokens, found = self._mapped
        if found is None and self._documents is not None:
            found = map_integers(_index_of(self.path), 8, self._documents)
            self._mapped = (tokens, found) if self.keep else (None, None)
        return found

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path, int]]:
        """Let a copy in another process map the file itself."""
        return TokenFile, (self.path, self.token_bytes)

    @property
    def documents(self) -> int:
        """Number of documents; 1 where no index separates them."""
        return 1 if self._documents is None else self._documents

    def document(self, number: int) -> TokenArray:
        """Return the tokens of one document, a view; IndexError where there is none."""
        if not 0 <= number < self.documents:
            raise IndexError(
                f"{self}: there is no document {number}, there are {self.documents} documents"
            )
        return self._document(number, self.tokens, self.ends)

    def _document(self, number: int, tokens: TokenArray, ends: UInt64Array | None) -> TokenArray:
        if ends is None:
            return tokens
        start = int(ends[number - 1]) if number else 0
        if start > int(ends[number]):
            raise ValueError(
                f"{self}: its index is corrupt: document {number} ends before it starts"
            )
        return tokens[start : int(ends[number])]

    def __iter__(self) -> Iterator[TokenArray]:
        """Yield the documents in order, as views."""
        tokens, ends = self.tokens, self.ends
        return (self._document(number, tokens, ends) for number in range(self.documents))

    def document_at(self, place: int) -> int:
        """Return the number of the document that holds the token at a place."""
        ends = self.ends
        if ends is None:
            return 0
        return int(np.searchsorted(ends, np.uint64(place), side="right"))

    def verify(self, vocab_size: int | None = None) -> None:
        """Read everything once: the order of the index and, given a vocabulary, every id.

        Raises:
            ValueError: names the document that ends before it starts or has an id out of range.
        """
        ends, tokens = self.ends, self.tokens
        if ends is not None and (steps := np.flatnonzero(ends[1:] < ends[:-1])).size:
            raise ValueError(
                f"{self}: its index is corrupt: document {int(steps[0]) + 1} ends before it starts"
            )
        for first in range(0, len(self) if vocab_size else 0, 1 << 24):
            block = tokens[first : first + (1 << 24)]
            if int(block.max()) >= int(vocab_size or 0):
                place = first + int(np.argmax(block))
                raise ValueError(
                    f"{self}, document {self.document_at(place)}: token {int(tokens[place])} "
                    f"at place {place} is outside the vocabulary of {vocab_size} ids"
                )


def _token_bytes(
    file: TokenFile,
    size: int,
    given: int | None,
    metadata: TokenMetadata | None,
    last: int,
) -> int:
    """Find out how many bytes an id has."""
    if given is not None and given not in (2, 4):
        raise ValueError(f"{file}: token_bytes must be 2 or 4, but {given} was given")
    if metadata and given not in (None, metadata.token_bytes):
        raise ValueError(
            f"{file}: token_bytes {given} was given, but its metadata says {metadata.token_bytes}"
        )
    if metadata:
        return metadata.token_bytes
    if given:
        return given
    for candidate in (2, 4):
        if last * candidate == size:
            return candidate
    raise ValueError(
        f"{file}: neither metadata nor an index that fits shows whether a token has 2 or 4 bytes: "
        "give token_bytes"
    )


def map_integers(path: Path, item_bytes: int, count: int) -> Any:
    """Map a file of unsigned integers read-only; torch's mapping keeps no descriptor open."""
    if not count:
        return np.empty(0, dtype=f"<u{item_bytes}")
    kind = _TORCH_TYPES[item_bytes]
    array = torch.from_file(str(path), shared=False, size=count, dtype=kind).numpy()
    array.flags.writeable = False
    return array


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def _read_index(path: Path) -> tuple[int | None, int]:
    """Read how many documents a file has, None where it has no index, and where the last ends."""
    index = _index_of(path)
    if not index.is_file():
        return None, 0
    size = index.stat().st_size
    if size % 8:
        raise ValueError(
            f"{str(index)!r}: {size} bytes are no whole number of uint64: the index is truncated"
        )
    with index.open("rb") as file:
        file.seek(max(size - 8, 0))
        return size // 8, int.from_bytes(file.read(8), "little")


def read_metadata(path: Path) -> TokenMetadata | None:
    """Read the metadata next to a file: `.ds.metadata`, or `.bin.json`; None where nothing does."""
    text, note = path.with_name(f"{path.name}.metadata"), path.with_name(f"{path.name}.json")
    if text.is_file():
        try:
            return TokenMetadata.from_text(text.read_text(encoding="utf-8"), repr(str(text)))
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(text)!r}: the metadata is not UTF-8 text") from error
    return _read_note(note) if note.is_file() else None


def _read_note(note: Path) -> TokenMetadata:
    """Read the json note of a flat file."""
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
        kinds = {"uint16": 2, "uint32": 4}
        return TokenMetadata(
            str(found.get("tokenizer", "")), kinds[found["dtype"]], found["tokens"]
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{str(note)!r}: a note of tokens is a json object with dtype 'uint16' or 'uint32' and "
            f"the number of tokens ({type(error).__name__}: {error})"
        ) from error
