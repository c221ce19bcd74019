"""Verification of checkpoints against what was written: all steps of a run, or one step folder."""

from __future__ import annotations

from collections.abc import Iterator

from kenotron_ckpt.checksums import manifest_faults
from kenotron_ckpt.folder import LATEST, defect, manifest_at, points_nowhere, step_names
from kenotron_ckpt.store import Location, Store, store_at


def verify_steps(path: Location) -> Iterator[tuple[Store, list[str]]]:
    """(folder, a sentence for each damage) of each step, as it is read; one process reads all.

    In a run folder the oldest step comes first, half-written ones count as damaged, and a
    ``latest.txt`` that names no step is a damage of the run folder itself.

    Raises ValueError when there is nothing to verify, OSError when a file cannot be read.
    """
    run = store_at(path)
    found = step_names(run)
    for folder in map(run.at, sorted(found, key=lambda name: (len(name), name))):
        try:
            faults = manifest_faults(folder, manifest_at(folder))
        except (OSError, ValueError) as error:  # there is no manifest to compare with
            faults = [defect(folder) or str(error)]
        yield folder, faults
    if points_nowhere(run, found):
        yield run, [f"{LATEST} does not name one of the steps here"]
