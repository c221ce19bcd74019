"""Preparing a step folder for a save: leftovers go, a checkpoint that cannot be read stays."""

from __future__ import annotations

import itertools
import re
import warnings
from fnmatch import fnmatch

from kenotron_ckpt.committing import files_in, sweep
from kenotron_ckpt.folder import SHARDS, manifest_at
from kenotron_ckpt.protocol import SaveMoment, passed
from kenotron_ckpt.store import Store

UNREADABLE = "unreadable"
"""Suffix of a step folder that was set aside; the name is no step's."""


def prepare(step_folder: Store) -> str:
    """Make a folder ready to be written; returns the tag that new files carry in their names.

    Left-overs of a save that did not finish are removed. The files of a complete checkpoint stay:
    the tag keeps new ones apart from them until the new manifest takes the place of the old. A
    folder whose manifest is not understood is set aside. Raises OSError.
    """
    passed(SaveMoment.BEGUN)
    _set_aside_unreadable(step_folder)
    step_folder.make()
    sweep(step_folder)
    tags = {_tag(name) for name in files_in(step_folder) if fnmatch(name, SHARDS)}
    return next(tag for tag in ("", ".v1", ".v2") if tag not in tags)


def _set_aside_unreadable(step_folder: Store) -> None:
    """Rename a step folder whose manifest is not understood, with a warning.

    Such a folder may be a checkpoint of a newer release, or one that can be repaired: nothing in it
    is removed or overwritten. Without a manifest, or with a valid one, nothing is done.

    Raises:
        OSError: the manifest cannot be read just now, or the folder cannot be renamed.
    """
    try:
        manifest_at(step_folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except ValueError as error:
        reason = error
    else:
        return
    run, first = step_folder.parent, f"{step_folder.name}.{UNREADABLE}"
    more = (f"{first}.{number}" for number in itertools.count(1))
    there = run.listing()
    aside = next(name for name in itertools.chain([first], more) if name not in there)
    run.rename(step_folder.name, aside)
    warnings.warn(
        f"{step_folder} is needed for a new checkpoint, and what was there cannot be read "
        f"({reason}): it is kept in {run.at(aside)}",
        stacklevel=2,
    )


def _tag(name: str) -> str:
    found = re.search(r"\.v\d+(?=\.)", name)
    return found.group() if found else ""
