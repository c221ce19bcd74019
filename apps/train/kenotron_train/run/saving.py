"""Saving a run: the engine, what a checkpoint holds, and whether it stands."""

from __future__ import annotations

from torch import Tensor

from kenotron_ckpt import (
    DataStatesConfig,
    HostSaver,
    SaveFailed,
    Saver,
    open_checkpoint,
)
from kenotron_dist.placement import TensorLayout
from kenotron_models import model_to_json
from kenotron_train.assemble import TrainingRun
from kenotron_train.data.data_settings import reading_of, tokenizer_state
from kenotron_train.log.run_folder import writing
from kenotron_train.progress import Progress
from kenotron_train.run.adapters import saved_adapter
from kenotron_train.run.upload import Uploads


def open_saver(training: TrainingRun, uploads: Uploads) -> Saver:
    """The engine that ``checkpoints.checkpointing_engine`` names, on ``checkpoints_path``.

    Collective over the mesh. Raises ValueError when another run writes there, OSError when no rank
    can.
    """
    checkpoints = training.checkpoints.section
    pool = checkpoints.datastates or DataStatesConfig()
    with writing():
        saver = Saver(
            checkpoints.checkpoints_path,
            training.mesh,
            background=checkpoints.checkpointing_engine == "datastates",
            every=checkpoints.checkpoint_interval,
            keep=checkpoints.keep_last,
            keep_every=checkpoints.keep_every,
            pool_bytes=pool.pool_bytes,
            pin=pool.pin_host_cache,
            threads=pool.parser_threads,
            verify=checkpoints.verify_after_write,
            on_commit=uploads.submit,
            busy=uploads.holds,
            on_failure="raise" if checkpoints.on_save_failure == "raise" else "report",
            above=uploads.latest_start,
        )
    uploads.begin(saver.generation)
    saver.reserve(_records(training))
    return saver


def save_run(
    saver: Saver | HostSaver, training: TrainingRun, progress: Progress, *, compared: bool = True
) -> None:
    """Begin a checkpoint of the run. Collective over the mesh.

    ``compared``: first, replicas of parameters are compared. Raises ValueError when they have come
    to differ, SaveFailed as the config asks for.
    """
    saved, mesh = training.checkpoints, training.mesh
    if compared:
        training.check_replicas()
    state = {
        **progress.to_state(),
        "optimizer_steps": training.optimizer.steps,
        "model_config": model_to_json(saved.model.model_config, saved.multipliers)
        | saved_adapter(training),
        "dtype": saved.model.dtype,
        "sequence_length": training.cost.sequence,
        "tokenizer": tokenizer_state(training.data.tokenizer),
        "reading": reading_of(training.data),
        "reproducible": saved.conditions,
    }
    with mesh.pulse.busy("saving a checkpoint"):
        saver.save(progress.step, _records(training), state, saved.yaml)


def _records(training: TrainingRun) -> dict[str, tuple[Tensor, TensorLayout]]:
    """Return what a checkpoint holds: parameters, this rank's slices of the optimizer's state."""
    averages = training.averages.state() if training.averages else {}
    return {**training.saved_records(), **training.optimizer.state(), **averages}


def check_saved(saver: Saver, step: int) -> None:
    """Read back the checkpoint of a step, each rank its share. Collective over the mesh.

    Raises SaveFailed naming each damaged file, or the checkpoint that is not there.
    """
    mesh, folder = saver.mesh, saver.folder / str(step)
    with mesh.pulse.busy("verifying a checkpoint"):
        try:
            faults = open_checkpoint(folder, mesh, verify=False).verify()
        except (OSError, ValueError) as error:
            faults = [str(error)]
    if faults:
        raise SaveFailed(f"the checkpoint of step {step} is not whole: " + "; ".join(faults))


def bytes_of(training: TrainingRun) -> int:
    """Bytes of this rank's part of a checkpoint."""
    return sum(tensor.nbytes for tensor, _ in _records(training).values())
