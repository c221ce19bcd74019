"""Documents from text files: one file, or every text file of a folder."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .org .tex .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js "
    ".ts .sh".split()
)


def text_documents(
    path: str | os.PathLike[str], suffixes: Collection[str] = TEXT_SUFFIXES
) -> list[str]:
    """Read the documents of a UTF-8 text file, or of a folder of such files.

    Args:
        path: a file (one document, whatever its suffix) or a folder, which is read recursively:
            one document per file, in the order of their paths. Hidden files and folders (a leading
            dot) and links to folders are passed over.
        suffixes: lower-case suffixes, with the dot, that make a file of a folder a text file.

    Returns:
        The texts, at least one; empty files are left out and a byte order mark is dropped.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: a file is not UTF-8 (names the file and the byte), a folder holds no text file,
            or there is no text in what was found.
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(
            f"no text at {str(root)!r}: the dataset's path must be a file or a folder of text files"
        )
    files = sorted(_text_files(root, suffixes)) if root.is_dir() else [root]
    if not files:
        raise ValueError(
            f"folder {str(root)!r} holds no text file: files ending in "
            f"{', '.join(sorted(suffixes))} are read, hidden ones are not"
        )
    documents = [text for text in map(read_utf8, files) if text]
    if not documents:
        raise ValueError(f"the corpus at {str(root)!r} is empty: {len(files)} file(s), no text")
    return documents


def read_utf8(path: Path) -> str:
    """Read one file as UTF-8 without its byte order mark; ValueError names the offending byte."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8 text: byte {error.start} is "
            f"0x{data[error.start]:02x} ({error.reason}); convert the file or leave it out"
        ) from error


def _text_files(root: Path, suffixes: Collection[str]) -> Iterator[Path]:
    """Yield the visible text files below a folder, in no order."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and path.is_file():
                yield path
