"""The bytes of a file as they come in, held against the manifest."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64

from kenotron_ckpt.index import FileEntry, Piece


class Received:
    """Sums up a file whose bytes are fed from the first to the last."""

    def __init__(self, name: str, entry: FileEntry, pieces: Sequence[Piece]) -> None:
        """Begin a file.

        Args:
            name: of the file.
            entry: its entry in the manifest.
            pieces: its pieces, in any order.
        """
        pieces = sorted(pieces, key=lambda piece: piece.offset)
        first = pieces[0].offset if pieces else entry.bytes
        self._name, self._entry = name, entry
        self._spans = [(0, first, entry.header, f"{name}: its header is not what was written")]
        self._spans += [
            (
                piece.offset,
                piece.offset + piece.bytes,
                piece.checksum,
                f"{name}: the bytes of {piece.key} are not those that were written",
            )
            for piece in pieces
        ]
        self._sum, self._place, self._faults = xxh3_64(), 0, list[str]()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        view, origin = memoryview(data), self._place
        self._place += len(view)
        while self._spans:
            begin, end, checksum, fault = self._spans[0]
            self._sum.update(view[max(begin - origin, 0) : max(end - origin, 0)])
            if self._place < end:
                return
            if self._sum.hexdigest() != checksum:
                self._faults.append(fault)
            self._sum = xxh3_64()
            self._spans.pop(0)

    def faults(self) -> list[str]:
        """One sentence for all that is wrong, once every byte was fed."""
        if self._place != self._entry.bytes:
            size = self._entry.bytes
            return [f"{self._name} is {self._place} bytes long, but {size} were written"]
        return self._faults
