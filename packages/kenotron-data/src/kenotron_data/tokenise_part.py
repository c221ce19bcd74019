"""One part of a tokenised source: some pieces in, one file of tokens out, in a worker process."""

import functools
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kenotron_data.text_pieces import TextPiece
from kenotron_data.token_file import TokenFile
from kenotron_data.token_writer import TokenWriter
from kenotron_data.tokenizer import Ids, TextTokenizer

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024
EMPTY = ".empty"
"""Suffix of the mark of a part that has no token, in place of its file."""

Placed = tuple[TextPiece, int, str]
"""A document: the piece and the place it comes from, and its text."""


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Pieces that go into one file.

    Args:
        path: the `.ds` file to make.
        pieces: what goes into it, in order.
        size: bytes of the pieces, roughly.
    """

    path: Path
    pieces: tuple[TextPiece, ...]
    size: int

    @property
    def mark(self) -> Path:
        """Marker of a finished part that has no token."""
        return self.path.with_suffix(EMPTY)

    def made(self) -> "PartMade | None":
        """Return what an earlier run has made of it; None if nothing."""
        if self.path.exists():
            file = TokenFile(self.path)
            return PartMade(self.size, file.documents, len(file), made_before=True)
        return PartMade(self.size, 0, 0, made_before=True) if self.mark.exists() else None


@dataclass(frozen=True)
class PartMade:
    """Result for a part: bytes of its pieces, documents and tokens of its file."""

    size: int
    documents: int
    tokens: int
    made_before: bool = False


@dataclass(frozen=True, kw_only=True)
class PartMaker:
    """Makes files of parts; all that a worker process needs.

    Args:
        tokenizer: encodes the documents.
        token_bytes: bytes of an id, 2 or 4.
    """

    tokenizer: TextTokenizer
    token_bytes: int

    def __call__(self, part: FilePart) -> PartMade:
        """Make the file of a part; nothing is left of it after an error.

        Raises:
            ValueError: names the file, the row and the rule that it breaks.
        """
        if (process := multiprocessing.parent_process()) is not None:
            _end_with(process)
        with TokenWriter(part.path, self.token_bytes, self.tokenizer.name) as writer:
            for batch in _batches(part.pieces):
                writer.add(self._encoded(batch))
            documents, tokens = writer.documents, writer.tokens
            if not tokens:
                writer.abort()
                part.mark.touch()
        return PartMade(part.size, documents if tokens else 0, tokens)

    def _encoded(self, batch: Sequence[Placed]) -> list[Ids]:
        """Encode documents together; an error names the first that cannot be encoded alone."""
        try:
            found = self.tokenizer.encode([text for _, _, text in batch])
        except Exception:  # of any class: each tokenizer has its own
            for piece, place, text in batch:
                try:
                    self.tokenizer.encode([text])
                except Exception as error:
                    raise ValueError(
                        f"{piece.describe(place)}: the text cannot be tokenised by "
                        f"{self.tokenizer.name!r} ({error})"
                    ) from error
            raise
        limit = 1 << 8 * self.token_bytes
        if self.tokenizer.vocab_size > limit:
            for (piece, place, _), ids in zip(batch, found, strict=True):
                if len(ids) and int(ids.max()) >= limit:
                    raise ValueError(
                        f"{piece.describe(place)}: token {int(ids.max())} does not fit in "
                        f"{self.token_bytes} bytes (ids below {limit}): use 4 bytes a token"
                    )
        return found


def texts_of(pieces: Sequence[TextPiece]) -> Iterator[str]:
    """Yield the documents of pieces. ValueError names a row without text."""
    return (text for _, _, text in _placed(pieces))


def _placed(pieces: Sequence[TextPiece]) -> Iterator[Placed]:
    for piece in pieces:
        for place, (text,) in piece:
            if not isinstance(text, str):
                shown = repr(text)
                raise ValueError(
                    f"{piece.describe(place)}: the text is {type(text).__name__} "
                    f"{shown if len(shown) <= 60 else shown[:57] + '...'}, not a string: repair "
                    "the row, or choose another column"
                )
            yield piece, place, text


def _batches(pieces: Sequence[TextPiece]) -> Iterator[list[Placed]]:
    batch: list[Placed] = []
    characters = 0
    for placed in _placed(pieces):
        batch.append(placed)
        characters += len(placed[2])
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@functools.cache
def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """End this worker with the process that started it, killed ones too: a pool does not."""

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="kenotron-data-parent", daemon=True).start()
