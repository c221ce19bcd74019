"""The steps of a save, in words: what a program that watches it, or a test that ends it, counts."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class SaveMoment(StrEnum):
    """A moment of a save at which what is on the disk has just changed, or is about to."""

    BEGUN = "the save has begun"
    FOLDER_MADE = "the step's folder, or one above it, is on the disk"
    LEFTOVER_REMOVED = "a file that belongs to no checkpoint is removed"
    SHARD_OPENED = "a shard file is there, empty"
    HEADER_WRITTEN = "a shard file's header is in the page cache"
    BLOCK_WRITTEN = "a block is in the page cache"
    SHARD_SYNCED = "a shard file is on the disk"
    SHARD_VERIFIED = "a shard file was read back and is what was saved"
    ALL_WRITTEN = "every rank has written its share"
    FOLDER_SYNCED = "the names of the shard files are on the disk"
    TEXT_OPENED = "an empty file is there, under a temporary name"
    TEXT_WRITTEN = "a text is on the disk under a temporary name"
    TEXT_RENAMED = "a text has its name"
    COMMITTED = "the manifest is in its place: the checkpoint stands"
    POINTED = "latest.txt names the checkpoint"
    MARKED = "the checkpoint is marked as verified"
    UNMADE = "an old checkpoint has lost its manifest"
    OLD_REMOVED = "an old checkpoint is gone"
    DISCARDED = "what a failed save has left is gone"


_listeners: list[Callable[[SaveMoment], None]] = []


def passed(step: SaveMoment) -> None:
    """Say that a save has come to ``step``."""
    for listener in _listeners:
        listener(step)


def listen(listener: Callable[[SaveMoment], None]) -> Callable[[], None]:
    """Have ``listener`` called at every step of every save of this process; returns how to stop.

    It is called in the thread that saves.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)
