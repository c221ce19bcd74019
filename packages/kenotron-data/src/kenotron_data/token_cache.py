"""Trust in a finished folder of token files: its files' checksums, and its owner."""

import hashlib
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ALWAYS_READ = 32 << 20
"""Bytes of a folder that are compared at each use; of a larger one the sizes are."""
_BLOCK = 8 << 20
_THREADS = 4

Sums = dict[str, list[Any]]
"""Bytes and checksum (BLAKE2b, 128 bits) of files, by name."""


def sums_of(folder: Path) -> Sums:
    """Read the files of a folder, hidden ones and notes apart; return their sums."""
    paths = sorted(path for path in folder.iterdir() if not path.name.endswith(".json"))
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(_digest, paths)
        return {p.name: [p.stat().st_size, d] for p, d in zip(paths, digests, strict=True)}


def check_sums(folder: Path, sums: Mapping[str, Any], *, all_bytes: bool = False) -> None:
    """Compare the files of a folder with the sums that its note has.

    Args:
        folder: the folder.
        sums: as `sums_of` made them.
        all_bytes: compare every byte; else those of folders of up to `ALWAYS_READ` bytes.

    Raises:
        ValueError: a file is missing, is longer or shorter, or has other bytes.
    """
    fix = "delete the folder to have it made again"
    for name, (size, _) in sums.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{str(folder / name)!r} is missing: {fix}") from None
        if found != size:
            raise ValueError(
                f"{str(folder / name)!r} has {found} bytes, but had {size} when it was made: {fix}"
            )
    if all_bytes or sum(size for size, _ in sums.values()) <= ALWAYS_READ:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = pool.map(_digest, [folder / name for name in sums])
            for (name, (_, digest)), found in zip(sums.items(), digests, strict=True):
                if found != digest:
                    raise ValueError(
                        f"{str(folder / name)!r} has other bytes than when it was made: {fix}"
                    )


def check_owner(folder: Path) -> None:
    """Refuse a folder of a shared cache that a stranger may have put there, or may change.

    Raises:
        ValueError: it or its files belong to neither this user, nor the owner of the cache, nor
            root; or everybody may write to them.
    """
    if not hasattr(os, "geteuid"):  # no POSIX
        return
    trusted = {os.geteuid(), 0, folder.parent.stat().st_uid}
    for path in (folder, *folder.iterdir()):
        about = path.lstat()
        if about.st_uid not in trusted:
            raise ValueError(
                f"{str(path)!r} belongs to user {about.st_uid}, who is neither you, nor the owner "
                "of the cache, nor root: it is not read; delete it, or use another cache folder"
            )
        if about.st_mode & stat.S_IWOTH and not stat.S_ISLNK(about.st_mode):
            raise ValueError(
                f"{str(path)!r} can be written by everybody: it is not read; take the permission "
                "away (chmod o-w), or use another cache folder"
            )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
