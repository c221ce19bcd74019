"""Batches that a run leaves out since it went back, until a checkpoint has them itself.

A run that goes back loads a checkpoint without the batch to skip.
``nonfinite/left_out.json`` has it, for each checkpoint that the run went back to: so a run that
was killed before its next save, or a replay, leaves out what the run that went on did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron_ckpt import MANIFEST, Store, on_first, replace_text, seal_of
from kenotron_data import Cursor
from kenotron_dist import Mesh
from kenotron_train.failures.nonfinite_folder import FOLDER
from kenotron_train.log.run_folder import writing
from kenotron_train.progress import Progress

FILE = "left_out.json"


def keep_left_out(run: Path, checkpoint: Store, left_out: Sequence[Cursor], mesh: Mesh) -> None:
    """Write down what a run leaves out from now on, after it went back to a checkpoint.

    Collective over the mesh.

    Args:
        run: the run's folder.
        checkpoint: the step folder that was loaded.
        left_out: beginnings of the batches.
        mesh: the mesh.

    Raises:
        OSError, ValueError: on all ranks.
    """

    def write() -> None:
        path, seal = run / FOLDER / FILE, _seal(checkpoint)
        entries = [entry for entry in _entries(path) if entry["seal"] != seal]
        own = {"checkpoint": str(checkpoint), "seal": seal}
        entries.append(own | {"left_out": [cursor.to_dict() for cursor in left_out]})
        with writing(f"cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(entries, indent=1) + "\n")

    on_first(mesh, write)


def left_out_since(
    run: Path, checkpoint: Store, progress: Progress, mesh: Mesh
) -> tuple[Progress, str]:
    """Progress of a checkpoint with all that the run left out when it last went back to it.

    Of a checkpoint that was written again since, nothing is known: the seal is another. Returns a
    remark, too; empty when there is nothing more. Collective. Raises ValueError for a damaged file.
    """
    path = run / FOLDER / FILE

    def known() -> Any:
        entries = _entries(path)
        seal = _seal(checkpoint) if entries else ""
        return next((entry["left_out"] for entry in entries if entry["seal"] == seal), None)

    found = on_first(mesh, known)
    left_out = tuple(map(Cursor.from_dict, found or ()))
    if found is None or left_out == progress.left_out:
        return progress, ""
    more = len(left_out) - len(progress.left_out)
    many = "a batch is" if more == 1 else f"{more} batches are"
    return replace(progress, left_out=left_out), f"; {many} left out since, as {path} says"


def _seal(checkpoint: Store) -> str:
    return seal_of(checkpoint.read(MANIFEST).decode())


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in entries:
            _ = entry["seal"], [Cursor.from_dict(each) for each in entry["left_out"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}): remove it; a run that resumes "
            "then finds the batches to leave out again"
        ) from error
    return entries
