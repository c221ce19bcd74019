"""One file of tokens, memory-mapped: datatrove's `.ds`, or a flat `.bin` with a note beside it.

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


@dataclass(frozen=True)
class TokenMetadata:
    """What is written beside a file of tokens.

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
        if len(lines) < 2 or not lines[1].isdecimal():
            raise ValueError(
                f"{place}: line 2 must be the number of tokens, but it is "
                f"{lines[1] if len(lines) > 1 else ''!r}"
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

    The mapping holds no file descriptor, so a folder may have any number of files. A copy made by
    pickle maps the file anew.

    Args:
        path: a `.ds` or `.bin` file.
        token_bytes: bytes of an id, 2 or 4; None takes what the file's metadata says, or the
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
        metadata = _read_metadata(self.path)
        ends = _map_index(self.path)
        self.token_bytes = _token_bytes(self, size, token_bytes, metadata, ends)
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
        if ends is not None and (len(ends) == 0 or int(ends[-1]) != count):
            raise ValueError(
                f"{self}: the file holds {count} tokens, but its index ends the last of "
                f"{len(ends)} documents at {int(ends[-1]) if len(ends) else 0}: one of them is "
                "truncated or belongs to another file"
            )
        self.tokenizer = metadata.tokenizer if metadata else ""
        self.tokens: TokenArray = map_integers(self.path, self.token_bytes, count)
        self.ends: UInt64Array | None = ends

    def __str__(self) -> str:
        """Name the file."""
        return repr(str(self.path))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path, int]]:
        """Let a copy in another process map the file itself."""
        return TokenFile, (self.path, self.token_bytes)

    @property
    def documents(self) -> int:
        """Number of documents; 1 where no index tells them apart."""
        return 1 if self.ends is None else len(self.ends)

    def document(self, number: int) -> TokenArray:
        """Return the tokens of one document, a view; IndexError where there is none."""
        if not 0 <= number < self.documents:
            raise IndexError(
                f"{self}: there is no document {number}, there are {self.documents} documents"
            )
        if self.ends is None:
            return self.tokens
        start = int(self.ends[number - 1]) if number else 0
        if start > int(self.ends[number]):
            raise ValueError(
                f"{self}: its index is corrupt: document {number} ends before it starts"
            )
        return self.tokens[start : int(self.ends[number])]

    def __iter__(self) -> Iterator[TokenArray]:
        """Yield the documents in order, as views."""
        return (self.document(number) for number in range(self.documents))

    def document_at(self, place: int) -> int:
        """Return the number of the document that holds the token at a place."""
        if self.ends is None:
            return 0
        return int(np.searchsorted(self.ends, np.uint64(place), side="right"))

    def verify(self, vocab_size: int | None = None) -> None:
        """Read everything once: the order of the index and, given a vocabulary, every id.

        Raises:
            ValueError: names the document that ends before it starts or has an id out of range.
        """
        if self.ends is not None and (steps := np.flatnonzero(self.ends[1:] < self.ends[:-1])).size:
            raise ValueError(
                f"{self}: its index is corrupt: document {int(steps[0]) + 1} ends before it starts"
            )
        for first in range(0, len(self) if vocab_size else 0, 1 << 24):
            block = self.tokens[first : first + (1 << 24)]
            if int(block.max()) >= int(vocab_size or 0):
                place = first + int(np.argmax(block))
                raise ValueError(
                    f"{self}, document {self.document_at(place)}: token {int(self.tokens[place])} "
                    f"at place {place} is outside the vocabulary of {vocab_size} ids"
                )


def _token_bytes(
    file: TokenFile,
    size: int,
    given: int | None,
    metadata: TokenMetadata | None,
    ends: UInt64Array | None,
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
    if ends is not None and len(ends):
        for candidate in (2, 4):
            if int(ends[-1]) * candidate == size:
                return candidate
    raise ValueError(
        f"{file}: neither metadata nor an index that fits says whether a token has 2 or 4 bytes: "
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


def _map_index(path: Path) -> UInt64Array | None:
    """Map the document ends of a file; None where it has no index."""
    index = path.with_name(f"{path.name}.index")
    if not index.is_file():
        return None
    size = index.stat().st_size
    if size % 8:
        raise ValueError(
            f"{str(index)!r}: {size} bytes are no whole number of uint64: the index is truncated"
        )
    return map_integers(index, 8, size // 8)


def _read_metadata(path: Path) -> TokenMetadata | None:
    """Read what lies beside a file: `.ds.metadata`, or `.bin.json`; None where nothing does."""
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
