"""Whether checkpoints are what was written: all steps of a run folder, or one step folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kenotron_ckpt.checksums import manifest_faults
from kenotron_ckpt.folder import LATEST, candidates, defect, manifest_at, points_nowhere


def verify_steps(path: str | Path) -> Iterator[tuple[Path, list[str]]]:
    """(folder, a sentence for each damage) of each step, as it is read; one process reads all.

    In a run folder the oldest step comes first, half-written ones count as damaged, and a
    ``latest.txt`` that names no step is a damage of the run folder itself.

    Raises ValueError when there is nothing to verify, OSError when a file cannot be read.
    """
    found = candidates(path)
    for folder in sorted(found, key=lambda each: (len(each.name), each.name)):
        try:
            faults = manifest_faults(folder, manifest_at(folder))
        except (OSError, ValueError) as error:  # there is no manifest to compare with
            faults = [defect(folder) or str(error)]
        yield folder, faults
    run = Path(path)
    if points_nowhere(run, found):
        yield run, [f"{LATEST} does not name one of the steps here"]
