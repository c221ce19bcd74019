"""Keys for everything random: a name becomes a number that no layout changes."""

from __future__ import annotations

import hashlib


def key(*parts: int | str, bits: int = 128) -> int:
    """A number below ``2**bits`` (at most 256) from ``parts``, the same on every machine.

    Parts differ by type and length: ``("a", "b")`` and ``("ab",)`` differ, as do 1 and
    "1".
    """
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(f"{type(part).__name__}:{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest()[: bits // 8], "little")
