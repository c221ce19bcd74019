"""Saving a run, and going on with it on any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_ckpt import (
    BlockingSaver,
    DataStatesConfig,
    SaveFailed,
    Saver,
    latest_step,
    open_checkpoint,
    verify_files,
)
from kenotron_ckpt.folder import is_nanotron, steps_in
from kenotron_ckpt.together import on_first
from kenotron_dist import Mesh, TensorLayout, check_replicas, named_parameters
from kenotron_dist.launch import restarts
from kenotron_train.assemble import Training, model_records
from kenotron_train.config import Config
from kenotron_train.initial import load_initial
from kenotron_train.progress import NEEDED, Progress, fresh_scale
from kenotron_train.reading import order_of, reading_of, tokenizer_state
from kenotron_train.upload import Uploads, local_copy
from kenotron_train.yaml_config import dump_config

NO_EFFECT = ("initializer_range", "max_position_embeddings", "pad_token_id", "pretraining_tp")
"""Fields of a model that may differ between a checkpoint and the config that resumes it."""
NO_EFFECT += ("use_cache", "bos_token_id", "eos_token_id")


def open_saver(training: Training, uploads: Uploads) -> Saver:
    """The engine that ``checkpoints.checkpointing_engine`` names, on ``checkpoints_path``.

    Collective over the mesh. Raises ValueError when another run writes there, OSError when nobody
    can.
    """
    checkpoints = training.config.checkpoints
    engine = Saver if checkpoints.checkpointing_engine == "datastates" else BlockingSaver
    pool = checkpoints.datastates or DataStatesConfig()
    try:
        saver = engine(
            checkpoints.checkpoints_path,
            training.mesh,
            every=checkpoints.checkpoint_interval,
            keep=checkpoints.keep_last,
            keep_every=checkpoints.keep_every,
            pool_bytes=max(1, int(pool.host_cache_size * 10**9)),
            pin=pool.pin_host_cache,
            threads=pool.parser_threads,
            verify=checkpoints.verify_after_write,
            on_commit=uploads.submit,
            busy=uploads.holds,
            on_failure="raise" if checkpoints.on_save_failure == "raise" else "report",
        )
    except OSError as error:
        raise OSError(
            f"{error}; change checkpoints.checkpoints_path to a folder that can be written"
        ) from error
    saver.reserve(_records(training))
    return saver


def save_run(saver: Saver, training: Training, progress: Progress) -> None:
    """Begin a checkpoint of the run. Collective over the mesh.

    Raises ValueError when replicas of a parameter have come to differ, SaveFailed as the config
    asks for.
    """
    config, mesh, model = training.config, training.mesh, training.model
    check_replicas(named_parameters(model.stack), model.layouts, mesh)
    state = {
        **progress.to_state(),
        "optimizer_steps": training.optimizer.steps,
        "model_config": asdict(config.model.model_config),
        "dtype": config.model.dtype,
        "sequence_length": config.longest_sequence,
        "tokenizer": tokenizer_state(config),
        "reading": reading_of(config),
    }
    with mesh.pulse.busy("saving a checkpoint"):
        saver.save(progress.step, _records(training), state, dump_config(config))


def _records(training: Training) -> dict[str, tuple[Tensor, TensorLayout]]:
    """What a checkpoint holds: parameters, and this rank's slices of the optimizer's state."""
    return {**model_records(training.model), **training.optimizer.state()}


def resume(training: Training) -> tuple[Progress, str]:
    """Load the checkpoint that the config names; how far it is, and a sentence about it.

    Where there is none, the weights that ``model.init_method`` may name are loaded. Collective over
    the mesh. Raises FileNotFoundError or ValueError when there is none, when it is damaged, of
    another model, or not of a training run.
    """
    config, mesh, checkpoints = training.config, training.mesh, training.config.checkpoints
    given, fetched = local_copy(config, mesh)
    if given is None:
        return Progress(loss_scale=fresh_scale(config)), load_initial(training)
    if given == Path(checkpoints.checkpoints_path) and not _has_checkpoint(given):
        begun = load_initial(training)
        afresh = f"No checkpoint in {given} yet: the run starts afresh"
        return Progress(loss_scale=fresh_scale(config)), afresh + (f"; {begun}" if begun else "")
    try:
        progress, remark = load_run(training, given, optimizer=checkpoints.load_optimizer)
    except NoCheckpoint as error:
        fix = "; correct it, or start afresh: null there, and a new checkpoints.checkpoints_path"
        raise ValueError(f"checkpoints.resume_checkpoint_path: {error}{fix}") from error
    if not checkpoints.load_lr_scheduler:
        progress = replace(progress, schedule_start=progress.step)
    return progress, remark + fetched


class NoCheckpoint(ValueError):
    """There is none, or none that is whole."""


def load_run(training: Training, path: Path, *, optimizer: bool = True) -> tuple[Progress, str]:
    """Load a checkpoint, the newest that is right of a run folder; how far it is, and a sentence.

    Without ``optimizer`` that begins afresh. Collective over the mesh. Raises ValueError when there
    is none, when it is of another model, or not of a training run.
    """
    config, mesh = training.config, training.mesh
    try:
        with mesh.pulse.busy("verifying a checkpoint"):
            checkpoint = open_checkpoint(path, mesh, select=_counts(optimizer))
    except ValueError as error:
        raise NoCheckpoint(str(error)) from error
    folder, manifest = checkpoint.folder, checkpoint.manifest
    state = dict(manifest.state)
    _check_state(state, config, folder)
    steps = int(state["optimizer_steps"])
    parameters: dict[str, Any] = dict(model_records(training.model))
    wanted: dict[str, Any] = {}
    dropped = ""
    if optimizer:
        # Before its first update an optimizer has masters and no more.
        wanted = training.optimizer.wanted(started=steps > 0)
        names = [layout.name for _, layout in (parameters | wanted).values()]
        dropped = _check_optimizer(names, manifest.records, config, folder)
    with mesh.pulse.busy("loading a checkpoint"):
        checkpoint.load(parameters)
        if wanted:  # after the parameters: an fp32 one shares its memory with its master
            checkpoint.load(wanted)
    if optimizer:
        training.optimizer.steps = steps
        training.optimizer.publish()
    else:
        training.optimizer.reload()
    progress = Progress.from_state(state, config)
    remark = _remark(progress, state, config, folder) + dropped
    for reason in checkpoint.passed_over:
        remark += f"; passed over {reason}"
    return progress, remark


def _counts(load_optimizer: bool) -> Callable[[str], bool]:
    """Which records must be right for a checkpoint to be resumed."""
    return lambda name: load_optimizer or not name.startswith("optimizer.")


def going_on(config: Config, mesh: Mesh) -> Config:
    """The config of a run that goes on where ``checkpoints_path`` has checkpoints of it.

    So the same command starts a run and goes on with it. A checkpoint in that folder that the
    config names counts as given: somebody goes back. A launcher that starts the run again does not.
    Collective over the mesh.
    """
    checkpoints = config.checkpoints
    folder, given = Path(checkpoints.checkpoints_path), checkpoints.resume_checkpoint_path
    inside = given is not None and restarts() == 0 and _is_step_of(Path(given), folder)
    if theirs := on_first(mesh, lambda: _of_nanotron(folder)):
        raise ValueError(
            f"checkpoints.checkpoints_path: {folder} has checkpoints of Nanotron ({theirs}), which "
            "would be written over: give another folder; `python -m kenotron_ckpt import-nanotron` "
            "makes a checkpoint there that resume_checkpoint_path may name"
        )
    sent = config.s3_upload is not None and config.s3_upload.remove_after_upload

    def has_begun() -> bool:
        return _has_checkpoint(folder) or (sent and (folder / "metrics.jsonl").exists())

    if inside or not on_first(mesh, has_begun):
        return config
    own = replace(
        checkpoints,
        resume_checkpoint_path=str(folder),
        load_optimizer=True,
        load_lr_scheduler=True,
    )
    return replace(config, checkpoints=own)


def _is_step_of(path: Path, folder: Path) -> bool:
    """Whether a path is a run folder itself or one of its steps."""
    path, folder = path.resolve(), folder.resolve()
    return path == folder or (path.parent == folder and path.name.isdecimal())


def _of_nanotron(folder: Path) -> str:
    """The newest step folder that is Nanotron's; empty when none is."""
    steps = steps_in(folder) if folder.is_dir() else []
    theirs = [str(step) for step in steps if is_nanotron(folder / str(step))]
    return theirs[-1] if theirs else ""


def check_saved(saver: Saver, step: int) -> None:
    """Read back the checkpoint of a step. Collective over the mesh.

    Raises SaveFailed naming each damaged file, or the checkpoint that is not there.
    """
    folder = saver.folder / str(step)

    def faults() -> list[str]:
        try:
            return verify_files(folder)
        except (OSError, ValueError) as error:
            return [str(error)]

    with saver.mesh.pulse.busy("verifying a checkpoint"):
        if found := on_first(saver.mesh, faults):
            raise SaveFailed(f"the checkpoint of step {step} is not whole: " + "; ".join(found))


def bytes_of(training: Training) -> int:
    """Bytes of this rank's part of a checkpoint."""
    return sum(tensor.nbytes for tensor, _ in _records(training).values())


def _has_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and latest_step(folder) is not None


def _check_state(state: dict[str, Any], config: Config, folder: Path) -> None:
    needed = (*NEEDED, "optimizer_steps", "model_config", "reading")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(
            f"{folder} cannot be resumed: its state lacks {', '.join(missing)}; was it written by "
            "this version of apps/train?"
        )
    given = json.loads(json.dumps(asdict(config.model.model_config)))  # tuples are lists there
    changed = [
        f"{name} is {given.get(name)!r} in the config and {value!r} in the checkpoint"
        for name, value in state["model_config"].items()
        if name not in NO_EFFECT and not name.startswith("is_") and given.get(name) != value
    ]
    if changed:
        raise ValueError(f"{folder} is of another model: model.model_config." + "; ".join(changed))


def _check_optimizer(
    wanted: Iterable[str], saved: Iterable[str], config: Config, folder: Path
) -> str:
    """Refuse a checkpoint of an optimizer that did not keep what the configured one does.

    Returns a remark on what it kept and the configured one does not.
    """
    needed, there = (
        {name.split(".")[1] for name in names if name.startswith("optimizer.")}
        for names in (wanted, saved)
    )
    if missing := sorted(needed - there):
        raise ValueError(
            f"{folder} has no {', '.join(missing)} of optimizer.optimizer_factory "
            f"({config.optimizer.optimizer_factory.name}): it was written with another optimizer; "
            "choose that one, or start this one afresh with checkpoints.load_optimizer: false"
        )
    extra = ", ".join(sorted(there - needed))
    return f"; {extra} of another optimizer is left behind" if extra else ""


def _remark(progress: Progress, state: dict[str, Any], config: Config, folder: Path) -> str:
    remark = f"Resumed after step {progress.step} from {folder}"
    now = order_of(reading_of(config))
    for name, before in order_of(state["reading"]).items():
        if now.get(name) != before:
            remark += f"; {name} changes from {before} to {now.get(name)}"
            if name != "global_batch_size":
                remark += ": samples may come twice or not at all"
    if progress.step >= config.tokens.train_steps:
        remark += f"; nothing is left to do: tokens.train_steps is {config.tokens.train_steps}"
    return remark
