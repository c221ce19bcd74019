"""The embedded corpus: the sources of the running Python's own standard library.

It needs no download. It is the same for every run of one Python release, not between releases.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DEFAULT_LIMIT = 8_000_000

_SKIPPED_FOLDERS = frozenset(
    "idlelib lib2to3 site-packages dist-packages ensurepip turtledemo lib-dynload".split()
)
_SKIPPED_PREFIXES = (".", "__pycache__", "__phello__", "test", "config-")
_SKIPPED_FILES = ("test", "_sysconfigdata", "sitecustomize", "usercustomize", ".")


def builtin_documents(
    limit: int = DEFAULT_LIMIT, folder: str | os.PathLike[str] | None = None
) -> list[str]:
    """Read the standard library's sources, one document per module.

    Tests, vendored tools and files that differ from machine to machine are passed over, as are
    files that are not UTF-8.

    Args:
        limit: largest size of the corpus in bytes of UTF-8; the last document is cut there.
        folder: where the library lies; None asks `sysconfig`.

    Returns:
        The sources in the order of their paths.

    Raises:
        ValueError: `limit` is not positive.
        FileNotFoundError: the folder holds no sources (a zipped or stripped Python).
    """
    if limit < 1:
        raise ValueError(f"the embedded corpus needs a limit of at least 1 byte, not {limit}")
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    documents: list[str] = []
    left = limit
    for path in sorted(_sources(root)):
        if left <= 0:
            break
        data = path.read_bytes()
        if data and _is_utf8(data):
            documents.append(data[:left].decode("utf-8", errors="ignore"))
            left -= len(data)
    if not documents:
        raise FileNotFoundError(
            f"no Python sources of the standard library in {str(root)!r}: "
            "name a text file or folder as the dataset instead"
        )
    return documents


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _sources(root: Path) -> Iterator[Path]:
    """Yield the modules below the library's folder, in no order."""
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES):
                yield Path(folder, name)
