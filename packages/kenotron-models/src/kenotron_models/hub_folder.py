"""Folders of models that are named as on the hub of Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def hub_folder(path: str) -> str:
    """Return the folder of a model of the hub in the cache of this machine.

    Nothing is downloaded: ``hf download NAME`` does, once for all ranks of a machine.

    Args:
        path: ``organisation/name``. What is no such name, is a path that exists, or is not in the
            cache, is returned as it is.
    """
    if NAME.fullmatch(path) is None or Path(path).exists():
        return path
    try:
        from transformers.utils import cached_file
    except ImportError:
        return path
    try:
        config = cached_file(path, "config.json", local_files_only=True)
    except (OSError, ValueError):  # it is not there, or no name of the hub
        return path
    return path if config is None else str(Path(config).parent)


def missing(path: str) -> str:
    """Return how a model that is named as on the hub gets here; nothing for another path."""
    if NAME.fullmatch(path) is None or Path(path).exists():
        return ""
    return f"; if it is a model of the hub: hf download {path}"
