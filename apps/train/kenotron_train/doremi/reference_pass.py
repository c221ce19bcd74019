"""One pass of the frozen reference over the samples of a proxy run, in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kenotron_ckpt import NoCheckpoint, on_first
from kenotron_config import Config
from kenotron_data import Cursor, LossWriter, StoredLosses, has_index
from kenotron_dist import Mesh, all_gather
from kenotron_engine import batch_losses
from kenotron_optim import OptimizerConfig
from kenotron_train.assemble import TrainingRun, build_training, data_plan
from kenotron_train.data.changed_data import fingerprint_of
from kenotron_train.data.reference_losses import (
    KEY,
    difference,
    losses_path,
    read_by,
    reference_identity,
)
from kenotron_train.data.stage_dataset import open_corpus, open_loader
from kenotron_train.data.vocabulary import check_vocabulary
from kenotron_train.log.printing import say
from kenotron_train.run.resume import load_run

REFERENCE = "doremi.ref_model_resume_checkpoint_path"


def write_reference_losses(mesh: Mesh, config: Config) -> None:
    """Write the reference's loss of every token that a proxy run of this config reads.

    Any layout may write, and any may read. What is there already of the same samples and the same
    reference is kept, and what is missing is added. Collective over the mesh. Raises ValueError
    where the reference cannot be read, or is of another model.
    """
    assert config.doremi is not None and config.doremi.is_proxy
    data = data_plan(config)
    check_vocabulary(data)
    training = build_training(config, mesh)
    path = Path(str(config.doremi.ref_model_resume_checkpoint_path))
    try:
        _, _, found = load_run(training, path, optimizer=False)
    except (NoCheckpoint, ValueError) as error:
        raise ValueError(f"{REFERENCE}: {error}") from error
    for stage in range(len(data.stages)):
        if data.batches.steps[stage]:
            _write_stage(training, stage, Path(str(found)))


def _write_stage(training: TrainingRun, stage: int, folder: Path) -> None:
    """Write the losses of a stage's samples; rank 0 has the file."""
    data, mesh = training.data, training.mesh
    with mesh.pulse.busy("reading the corpus"):
        corpus = open_corpus(data, stage)
    found = fingerprint_of(corpus, mesh)
    assert found is not None and has_index(corpus.training)
    path, sequence = losses_path(data, stage), data.sequences[stage]
    about = read_by(data, stage, found)
    about |= {"reference": on_first(mesh, lambda: reference_identity(folder))}
    kept = on_first(mesh, lambda: _kept(path, about, sequence))
    batches = data.batches
    needed = batches.samples(stage) + _left_out(training.optim) * batches.full(stage)
    named = f"{path}: losses of {max(kept, needed):,} samples by {folder}"
    if kept >= needed:
        _tell(mesh, f"{named}, all of them there already")
        return
    cursor = Cursor(stage, kept // len(corpus.training), kept)
    with ExitStack() as opened:
        loader = opened.enter_context(open_loader(data, mesh, corpus, cursor))
        writer = None
        if mesh.rank == 0:
            with _writing(path):
                writer = opened.enter_context(LossWriter(path, sequence, about, kept))
        done = kept
        while done < needed:
            rows = all_gather(batch_losses(training, next(loader)), mesh["dp"])
            done += len(rows)
            if writer is not None:
                with _writing(path):
                    writer.add(rows.cpu().numpy())
        if writer is not None:
            with _writing(path):
                writer.finish()
    _tell(mesh, f"{named}, {done - kept:,} of them written")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the key and the file in an error of the system."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{KEY}: {path} cannot be written ({error}): make room there, or give another folder; "
            "the same command continues"
        ) from error


def _left_out(optimizer: OptimizerConfig) -> int:
    """Return how many batches a run may leave out, and read others instead."""
    return optimizer.max_rollbacks if optimizer.nonfinite == "rollback" else 0


def _kept(path: Path, about: dict[str, object], sequence: int) -> int:
    """Count the samples of the file that are right."""
    try:
        stored = StoredLosses(path)
    except (FileNotFoundError, ValueError):
        return 0
    return 0 if difference(stored, about, sequence) else stored.samples


def _tell(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        say(text)
