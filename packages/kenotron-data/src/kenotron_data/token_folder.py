"""The token files of a folder as one source: sorted by name, one after the other."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kenotron_data.token_file import TokenArray, TokenFile, read_metadata

MOST_KEPT = 8000
"""Files that are read together and stay mapped; of more, each is mapped at each read."""


class TokenFolder:
    """Read all `.ds` files of a folder (or all `.bin` files where it has no `.ds`).

    Tokens and documents are numbered through all files, in the order of the files' names.

    Args:
        path: the folder; files below its subfolders are read too where `recursive` is set, in the
            order of their paths.
        token_bytes: bytes of an id; None takes that of each file.
        recursive: whether subfolders are read.
        shuffle_files: read the files in the order that `numpy.random.default_rng(seed)` gives,
            with this number as the seed; Nanotron's older Nanosets use 42.

    Raises:
        FileNotFoundError: there is no such folder, or no file of tokens in it.
        ValueError: a file is empty, truncated or corrupt, or files differ in the bytes of an id or
            in their tokenizer; the message names the file and the rule.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        token_bytes: int | None = None,
        *,
        recursive: bool = False,
        shuffle_files: int | None = None,
    ) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self}: there is no such folder of token files")
        names = _found(self.path, ".ds", recursive) or _found(self.path, ".bin", recursive)
        if not names:
            raise FileNotFoundError(f"{self}: the folder holds no *.ds and no *.bin file")
        files = [TokenFile(name, token_bytes) for name in names]
        _check_alike(files)
        if shuffle_files is not None:
            order = np.random.default_rng(shuffle_files).permutation(len(files))
            files = [files[i] for i in order]
        self.files = tuple(files)
        keep_few(self.files)
        self.token_bytes = files[0].token_bytes
        self.tokenizer = files[0].tokenizer
        lengths = np.array([len(file) for file in files], dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        """(files + 1,) int64: where each file's tokens begin among all, and their number."""
        documents = np.array([file.documents for file in files], dtype=np.int64)
        self.document_offsets = np.concatenate([[0], np.cumsum(documents)])
        """(files + 1,) int64: number of each file's first document, and their number."""

    def __str__(self) -> str:
        """Name the folder."""
        return repr(str(self.path))

    def __len__(self) -> int:
        """Return the number of tokens of all files."""
        return int(self.offsets[-1])

    @property
    def documents(self) -> int:
        """Number of documents of all files."""
        return int(self.document_offsets[-1])

    def document(self, number: int) -> TokenArray:
        """Return the tokens of one document, a view; IndexError where there is none."""
        if not 0 <= number < self.documents:
            raise IndexError(
                f"{self}: there is no document {number}, there are {self.documents} documents"
            )
        file = int(np.searchsorted(self.document_offsets, number, side="right")) - 1
        return self.files[file].document(number - int(self.document_offsets[file]))

    def __iter__(self) -> Iterator[TokenArray]:
        """Yield the documents of all files in order, as views."""
        return (document for file in self.files for document in file)


def tokenizer_of_folder(path: str | os.PathLike[str]) -> str:
    """Return the tokenizer that the first token file of a folder was made with.

    Args:
        path: the folder, as for `TokenFolder`; its metadata alone are read.

    Returns:
        The name in the metadata; empty where there is no folder, no file or no name.

    Raises:
        ValueError: the metadata cannot be read; the message names the file.
    """
    folder = Path(path)
    names = _found(folder, ".ds", False) or _found(folder, ".bin", False)
    metadata = read_metadata(names[0]) if names else None
    return metadata.tokenizer if metadata else ""


def _found(folder: Path, suffix: str, recursive: bool) -> list[Path]:
    """List the visible files of a suffix, sorted by path."""
    found = folder.rglob(f"*{suffix}") if recursive else folder.glob(f"*{suffix}")
    return sorted(
        path
        for path in found
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )


def _check_alike(files: list[TokenFile]) -> None:
    """Refuse files whose ids differ in size or, where both are known, in their tokenizer."""
    for file in files[1:]:
        for what in ("token_bytes", "tokenizer"):
            first, other = getattr(files[0], what), getattr(file, what)
            if first != other and first and other:
                raise ValueError(
                    f"{file}: its {what} is {other!r}, but that of {files[0]} is {first!r}: the "
                    "files of a folder must be of one kind"
                )


def keep_few(files: Sequence[TokenFile]) -> None:
    """Let files be mapped only while they are read, where they are more than `MOST_KEPT`."""
    if len(files) > MOST_KEPT:
        for file in files:
            file.keep = False
