"""Preparing a step folder for a save: leftovers go, a checkpoint that cannot be read stays."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path

from kenotron_ckpt.committing import make, sweep, sync
from kenotron_ckpt.folder import SHARDS, manifest_at
from kenotron_ckpt.protocol import Step, passed

UNREADABLE = "unreadable"
"""Suffix of a step folder that was set aside; the name is no step's."""


def prepare(step_folder: Path) -> str:
    """Make a folder ready to be written; returns the tag that new files carry in their names.

    Left-overs of a save that did not finish are removed. The files of a complete checkpoint stay:
    the tag keeps new ones apart from them until the new manifest takes the place of the old. A
    folder whose manifest is not understood is set aside. Raises OSError.
    """
    passed(Step.BEGUN)
    set_aside_unreadable(step_folder)
    make(step_folder)
    sweep(step_folder)
    tags = {_tag(path.name) for path in step_folder.glob(SHARDS)}
    return next(tag for tag in ("", ".v1", ".v2") if tag not in tags)


def set_aside_unreadable(step_folder: Path) -> Path | None:
    """Rename a step folder whose manifest is not understood, with a warning; its new path.

    Such a folder may be a checkpoint of a newer release, or one that can be repaired: nothing in it
    is removed or overwritten. Returns None when there is no manifest or a valid one.

    Raises:
        OSError: the manifest cannot be read just now, or the folder cannot be renamed.
    """
    try:
        manifest_at(step_folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        reason = error
    else:
        return None
    first = step_folder.with_name(f"{step_folder.name}.{UNREADABLE}")
    more = (first.with_name(f"{first.name}.{number}") for number in itertools.count(1))
    aside = next(path for path in itertools.chain([first], more) if not path.exists())
    step_folder.rename(aside)
    sync(aside.parent)
    warnings.warn(
        f"{step_folder} is needed for a new checkpoint, and what was there cannot be read "
        f"({reason}): it is kept in {aside}",
        stacklevel=2,
    )
    return aside


def _tag(name: str) -> str:
    found = re.search(r"\.v\d+(?=\.)", name)
    return found.group() if found else ""
