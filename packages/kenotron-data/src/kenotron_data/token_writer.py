"""Write files of tokens, document by document, so that a reader never meets half of one."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kenotron_data.token_file import TokenMetadata

_BLOCK = 1 << 20
"""Tokens that are gathered before they are written."""

Document = NDArray[np.integer] | Sequence[int]


class TokenWriter:
    """Write one file of tokens, with its index of documents and its metadata.

    The files get their names in `close()`, the tokens last: until then they are called
    `*.partial`, which no reader takes. What a stopped process left is written over. In a `with`
    block an error leaves nothing behind.

    Args:
        path: the file to make: `x.ds` in datatrove's layout, or a flat `x.bin` with `x.bin.json`.
            Its folder is made if need be.
        token_bytes: bytes of an id, 2 or 4; 2 is enough for vocabularies of up to 65,536.
        tokenizer_name: name of the tokenizer for the metadata.
        vocab_size: also refuse ids from this one up; None refuses only what 2 or 4 bytes cannot
            hold.

    Raises:
        FileExistsError: the file exists already.
        ValueError: another suffix, size of a token or a name with a line break.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        token_bytes: int,
        tokenizer_name: str = "",
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".ds", ".bin"):
            raise ValueError(f"{self}: a file of tokens is called *.ds or *.bin")
        if token_bytes not in (2, 4):
            raise ValueError(f"{self}: token_bytes must be 2 or 4, but {token_bytes} was given")
        if tokenizer_name.splitlines() not in ([], [tokenizer_name]):
            raise ValueError(f"{self}: the name of the tokenizer has more than one line")
        if self.path.exists():
            raise FileExistsError(f"{self}: the file exists; delete it or choose another name")
        self.token_bytes = token_bytes
        self.tokenizer_name = tokenizer_name
        self.limit = min(vocab_size or 1 << 8 * token_bytes, 1 << 8 * token_bytes)
        self.tokens = 0
        self.documents = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for part in ("", ".index"):  # not emptied but removed: its writer may still live
            self._partial(part).unlink(missing_ok=True)
        self._data = self._partial("").open("wb")
        self._index = self._partial(".index").open("wb")
        self._open = True

    def __str__(self) -> str:
        """Name the file."""
        return repr(str(self.path))

    def add(self, documents: Iterable[Document]) -> None:
        """Append documents; each is an array or sequence of ids and may be empty.

        Raises:
            ValueError: a document is no list of ids, or one is out of range: the message names the
                document. Those before it are written.
        """
        if not self._open:
            raise ValueError(f"{self}: this writer is closed")
        block: list[NDArray[np.integer]] = []
        waiting = 0
        try:
            for array in self._checked(documents):
                block.append(array)
                waiting += len(array)
                if waiting >= _BLOCK:
                    full, block, waiting = block, [], 0
                    self._write(full)
        finally:
            self._write(block)

    def close(self) -> None:
        """Finish the file and give it its name. May be called twice.

        Raises:
            ValueError: no token was added; nothing is left behind then.
        """
        if not self._open:
            return
        if not self.tokens:
            self.abort()
            raise ValueError(f"{self}: no token was added, and a file of tokens is not empty")
        self._open = False
        for file in (self._data, self._index):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        suffix, text = self._note()
        with self._partial(suffix).open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        for part in (".index", suffix, ""):
            self._partial(part).replace(self.path.with_name(self.path.name + part))

    def abort(self) -> None:
        """Give up: delete what was written so far. Does nothing after `close()`."""
        if self._open:
            self._open = False
            for file, part in ((self._data, ""), (self._index, ".index")):
                file.close()
                self._partial(part).unlink(missing_ok=True)

    def __enter__(self) -> "TokenWriter":
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the writer, or give up after an error."""
        if kind is None:
            self.close()
        else:
            self.abort()

    def _partial(self, part: str) -> Path:
        return self.path.with_name(f"{self.path.name}{part}.partial")

    def _note(self) -> tuple[str, str]:
        """Return the suffix and the text of the file that describes the tokens."""
        if self.path.suffix == ".ds":
            metadata = TokenMetadata(self.tokenizer_name, self.token_bytes, self.tokens)
            return ".metadata", metadata.to_text()
        note = {"dtype": f"uint{8 * self.token_bytes}", "tokens": self.tokens}
        note |= {"documents": self.documents, "tokenizer": self.tokenizer_name}
        return ".json", json.dumps(note, indent=1) + "\n"

    def _checked(self, documents: Iterable[Document]) -> Iterator[NDArray[np.integer]]:
        """Yield the documents in the type of the file; ValueError names one that does not fit."""
        kind = np.dtype(f"<u{self.token_bytes}")
        first = self.documents
        for number, document in enumerate(documents, first):
            array = np.asarray(document)
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise ValueError(
                    f"{self}, document {number}: a document is one dimension of integer ids, but "
                    f"{array.dtype} of shape {array.shape} was given"
                )
            if array.size and not (0 <= array.min() and array.max() < self.limit):
                place = int(np.flatnonzero((array < 0) | (array >= self.limit))[0])
                raise ValueError(
                    f"{self}, document {number}: id {array[place]} at place {place} is not in "
                    f"[0, {self.limit})"
                )
            yield array.astype(kind, copy=False)

    def _write(self, block: list[NDArray[np.integer]]) -> None:
        """Write documents; an index entry is a document's end counted from the file's start."""
        if block:
            lengths = np.array([len(array) for array in block], dtype=np.int64)
            ends = self.tokens + np.cumsum(lengths)
            self._data.write(np.concatenate(block).data)
            self._index.write(ends.astype("<u8").data)
            self.tokens = int(ends[-1])
            self.documents += len(block)
