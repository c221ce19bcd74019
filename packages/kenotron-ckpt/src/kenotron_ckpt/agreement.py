"""Run folders whose parts contradict one another, such as a copy that was cut off."""

from __future__ import annotations

import os
from pathlib import Path

from kenotron_ckpt.folder import LATEST, MANIFEST, SHARDS, has_manifests, latest_named, steps_in


def contradiction(folder: str | Path) -> str:
    """Return what a run folder names and does not have; empty where its parts agree.

    No crash of a program that saves leaves such a folder: ``latest.txt`` is written after the
    manifest that it names, and one checkpoint is written after the other.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return ""
    named = latest_named(folder)
    if named is not None and _has_shards(folder / str(named)):
        if not os.path.lexists(folder / str(named) / MANIFEST):
            return f"{LATEST} names step {named}, whose folder has shards and no {MANIFEST}"
    if has_manifests(folder):
        return ""
    if os.path.lexists(folder / LATEST):
        what = "nothing that is a step" if named is None else f"step {named}"
        return f"{LATEST} names {what}, but no step folder here has a {MANIFEST}"
    broken = [path.name for path in folder.iterdir() if path.is_symlink() and not path.exists()]
    if steps := [name for name in sorted(broken) if name.isdecimal()]:
        return f"step folder {steps[0]} is a link to nothing"
    if len(parts := unfinished(folder)) > 1:
        listed = ", ".join(map(str, parts))
        return f"steps {listed} have shards, but none of their folders has a {MANIFEST}"
    return ""


def unfinished(folder: str | Path) -> list[int]:
    """Return the steps of a run folder that have shards and no manifest, ascending."""
    folder = Path(folder)
    steps = steps_in(folder) if folder.is_dir() else []
    return [
        step
        for step in steps
        if _has_shards(folder / str(step)) and not has_manifests(folder, [step])
    ]


def _has_shards(step_folder: Path) -> bool:
    return step_folder.is_dir() and any(step_folder.glob(SHARDS))
