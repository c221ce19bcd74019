"""Folders that commands make: written aside first, and apart from what is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = {"config.json": "model of Hugging Face", "adapter_config.json": "adapter of peft"}
"""Files that a folder has that may be replaced, and the kind of folder."""


def check_apart(folder: Path, *sources: object) -> None:
    """Raise ValueError for a folder to make that is, or contains, one that is read.

    ``sources``: paths, or places whose text is a path or a URL.
    """
    place = folder.resolve()
    for source in sources:
        read = Path(str(source).removeprefix("file://")).resolve()
        if read.is_relative_to(place):
            raise ValueError(f"{folder} has {source} in it, which is read: give --out a new folder")


def check_replaceable(folder: Path, marker: str, overwrite: bool) -> None:
    """Raise ValueError for a folder that is there and may not be replaced.

    ``marker``: the file, of ``KINDS``, that a folder to be replaced must have.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{folder} is there: give --overwrite to replace it")
    if not (folder / marker).is_file():
        raise ValueError(f"{folder} is no {KINDS[marker]} ({marker} is missing): remove it")


@contextmanager
def draft_of(folder: Path) -> Iterator[Path]:
    """Make an empty folder that gets its name at the end, and is removed after an error.

    An older folder of that name goes last; where it is a link, what it points to is replaced.
    """
    place = folder.resolve()
    draft = place.with_name(f".{place.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        if place.exists():
            older = place.with_name(f".{place.name}.{os.getpid()}.old")
            place.rename(older)
            draft.rename(place)
            shutil.rmtree(older)
        else:
            draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
