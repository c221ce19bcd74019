"""Reaction to a step that is not finite: a record of its batch, and perhaps a rollback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kenotron_ckpt import NoCheckpoint, Saver, Store, on_first, steps_in, store_at
from kenotron_engine import StepResult
from kenotron_optim import NonFinite, NonFiniteStep
from kenotron_train.assemble import TrainingRun
from kenotron_train.failures.nonfinite_folder import write_record
from kenotron_train.failures.nonfinite_record import Blame, TakenBatch
from kenotron_train.failures.skipped_batches import keep_left_out
from kenotron_train.progress import Progress
from kenotron_train.run.resume import load_run
from kenotron_train.run.upload import upload_url


@contextmanager
def recorded(training: TrainingRun, taken: TakenBatch) -> Iterator[None]:
    """Write a record before the error of a step that is not finite is raised."""
    try:
        yield
    except NonFiniteStep as error:
        about = record(training, taken, error.found)
        raise NonFiniteStep(f"{error}; {about}", error.found) from error


def record(training: TrainingRun, taken: TakenBatch, found: NonFinite) -> str:
    """Write down the batch of a step that is not finite; a sentence about it. Collective."""
    cause, run = taken.blame(training, found), training.log.folder
    path, trouble = on_first(training.mesh, lambda: _written(run, cause))
    if trouble:
        return f"first module: {cause.module}; no record could be written: {trouble}"
    again = path if training.optim.nonfinite == "rollback" else cause.step
    return (
        f"first module: {cause.module}; its samples are in {path}, and --replay-step {again} makes "
        "it again"
    )


def _written(run: Path, cause: Blame) -> tuple[str, str]:
    """Path of the record; or why there is none, which hides no cause and ends no run."""
    try:
        return str(write_record(run, cause.to_dict())), ""
    except OSError as error:
        return "", str(error)


def goes_back(training: TrainingRun, result: StepResult) -> bool:
    """Return whether this step is undone together with those since the newest checkpoint."""
    policy = training.optim.nonfinite
    return result.nonfinite is not None and not result.overflow and policy == "rollback"


def go_back(
    training: TrainingRun, saver: Saver, progress: Progress, found: NonFinite
) -> tuple[Progress, str]:
    """Load the newest checkpoint; from now on the batch where ``progress`` stands is left out.

    Returns how far the run is now, and a sentence. Collective over the mesh. Raises
    FloatingPointError when there is no checkpoint, or when the run went back often enough.
    """
    most, step = training.optim.max_rollbacks, progress.step + 1
    if len(progress.left_out) >= most:
        raise FloatingPointError(
            f"step {step}: {found}; the run has gone back {len(progress.left_out)} times, and "
            f"optimizer.max_rollbacks is {most}: lower the learning rate or look at the data"
        )
    saver.finish()
    before, about, checkpoint = _load_before(training, saver.folder, step, found)
    left_out = (*progress.left_out, progress.cursor)
    keep_left_out(saver.folder, checkpoint, left_out, training.mesh)
    said = f"step {step} is undone, and its batch left out ({len(left_out)} of at most {most}): "
    return replace(before, left_out=left_out), said + about


def _load_before(
    training: TrainingRun, folder: Path, step: int, found: NonFinite
) -> tuple[Progress, str, Store]:
    """Load the newest checkpoint before a step: the folder may hold later ones, of another try.

    Those of the run's folder come first, then those of the store that it uploads to.
    """
    saved = training.checkpoints
    given, url = saved.section.resume_checkpoint_path, upload_url(saved.upload)
    runs = [store_at(place) for place in (folder, url) if place is not None]

    def earlier(run: Store) -> list[int]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted((each for each in steps_in(run) if each < step), reverse=True)
        return []

    for run in runs:
        for each in on_first(training.mesh, partial(earlier, run)):
            with suppress(NoCheckpoint):
                return load_run(training, run.at(str(each)))
    with suppress(NoCheckpoint):
        if given is not None:
            return load_run(training, given)
    raise FloatingPointError(
        f"step {step}: {found}; there is no checkpoint in {folder} to go back to: set "
        "checkpoints.save_initial_state: true, or a shorter checkpoint_interval"
    )
