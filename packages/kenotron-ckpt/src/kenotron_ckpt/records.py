"""Records: logical tensors cut in pieces, and the files that hold them. Pure, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One block of a record and where it is stored."""

    file: str
    """Name of a file next to the manifest."""
    key: str
    """Name of the block in that file."""
    start: Shape
    """First index of the block in the logical tensor, per dimension."""
    shape: Shape
    """Elements along each dimension."""
    offset: int = 0
    """First byte of the block in the file."""
    bytes: int = 0
    """Number of its bytes."""
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
    """Required bytes of a file."""

    bytes: int
    """Length of the file."""
    header: str
    """Checksum of what stands before the first block: 8 bytes of length and that much JSON."""
