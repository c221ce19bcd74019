"""Going on with a run, on any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron_ckpt import (
    Checkpoint,
    NoCheckpoint,
    has_manifests,
    is_nanotron,
    on_first,
    read_preferred,
    steps_in,
)
from kenotron_config import Config
from kenotron_dist import Mesh
from kenotron_dist.launch import restarts
from kenotron_models import model_to_json
from kenotron_optim import AVERAGE
from kenotron_train.assemble import Training
from kenotron_train.data.changed_data import comparable
from kenotron_train.data.data_settings import order_of, reading_of
from kenotron_train.failures.passing_errors import PassingError, names_passing
from kenotron_train.failures.skipped_batches import left_out_since
from kenotron_train.run.initial import load_initial
from kenotron_train.run.progress import NEEDED, Progress
from kenotron_train.run.saved_tensors import check_module, check_optimizer, converted
from kenotron_train.run.upload import local_copy

NO_EFFECT = ("initializer_range", "max_position_embeddings", "pad_token_id", "pretraining_tp")
"""Fields of a model that may differ between a checkpoint and the config that resumes it."""
ROPE = ("rope_theta", "rope_scaling")
"""Those that ``checkpoints.accept_changed_rope`` lets differ, too."""
NO_EFFECT += ("use_cache", "bos_token_id", "eos_token_id", "path")


def resume(training: Training, run: Path | None = None) -> tuple[Progress, str]:
    """Load the checkpoint that the config names; how far it is, and a sentence about it.

    Where there is none, the weights that ``model.init_method`` may name are loaded. What the run
    in the folder ``run`` (default: ``checkpoints_path``) has left out since it went back to that
    checkpoint stays left out. Collective over the mesh. Raises FileNotFoundError or ValueError
    when there is none, when it is damaged, of another model, or not of a training run, and
    PassingError when none could be read and an error that may pass is among the reasons.
    """
    config, mesh, checkpoints = training.config, training.mesh, training.config.checkpoints
    given, fetched = local_copy(config, mesh)
    if given is None:
        return Progress.fresh(config), load_initial(training)
    own = given == Path(checkpoints.checkpoints_path)
    if own and not on_first(mesh, lambda: has_manifests(given)):
        begun = load_initial(training)
        afresh = f"No checkpoint in {given} yet: the run starts afresh"
        return Progress.fresh(config), afresh + (f"; {begun}" if begun else "")
    try:
        progress, remark, step = load_run(training, given, optimizer=checkpoints.load_optimizer)
    except NoCheckpoint as error:
        failure = PassingError if names_passing(str(error)) else ValueError
        raise failure(_unreadable(str(error), own)) from error
    if not checkpoints.load_lr_scheduler:
        progress = replace(progress, schedule_start=progress.step)
    run = Path(checkpoints.checkpoints_path) if run is None else run
    progress, more = left_out_since(run, step, progress, mesh)
    return progress, remark + fetched + more


def _unreadable(error: str, own: bool) -> str:
    """Message for checkpoints of which none can be read; ``own``: they are this run's."""
    if not own:
        fix = "; correct it, or start afresh: null there, and a new checkpoints.checkpoints_path"
        return f"checkpoints.resume_checkpoint_path: {error}{fix}"
    return (
        f"checkpoints.checkpoints_path: {error}\n"
        "the run does not start afresh over them, and nothing was changed: try again where a file "
        "could not be read, install the release that wrote them where the format is another, move "
        "damaged step folders away, or start afresh in a new checkpoints.checkpoints_path"
    )


def load_run(
    training: Training, path: Path, *, optimizer: bool = True
) -> tuple[Progress, str, Path]:
    """Load a checkpoint, the newest that is undamaged of a run folder.

    Bytes are verified while they are read: a damaged checkpoint may fill tensors before its damage
    is found, and the next one then fills all of them again. Returns how far it is, a sentence about
    it, and its step folder. Without ``optimizer`` that begins afresh. Collective over the mesh.

    Raises NoCheckpoint when there is none that can be read: then the tensors may be NaN, and must
    not be trained on or saved. Raises ValueError when it is of another model, or
    not of a training run.
    """
    with training.mesh.pulse.busy("loading a checkpoint"):
        return read_preferred(
            path, training.mesh, lambda found: _load_from(training, found, optimizer)
        )


def _load_from(
    training: Training, checkpoint: Checkpoint, optimizer: bool
) -> tuple[Progress, str, Path]:
    """``load_run`` of one checkpoint. Raises DamagedCheckpoint, perhaps after tensors changed."""
    config, mesh = training.config, training.mesh
    folder, manifest = checkpoint.folder, checkpoint.manifest
    state = dict(manifest.state)
    _check_state(state, config, folder)
    steps = int(state["optimizer_steps"])
    parameters: dict[str, Any] = dict(training.records())
    wanted: dict[str, Any] = {}
    dropped = check_module(config, folder, manifest.records)
    averages, remark = _averages(training, checkpoint, optimizer and steps > 0)
    if optimizer:
        # Before its first update an optimizer has masters and no more: what a damaged checkpoint
        # left in other state is zero again.
        wanted = training.optimizer.wanted(started=steps > 0)
        names = [layout.name for _, layout in (parameters | wanted | averages).values()]
        dropped += check_optimizer(names, manifest.records, config, folder, mesh)
        dropped += converted(wanted, manifest.records)
    checkpoint.load(parameters)
    if wanted := wanted | averages:  # later: an fp32 parameter shares its memory with its master
        checkpoint.load(wanted)
    if optimizer:
        training.optimizer.steps = steps
        training.optimizer.publish()
    else:
        training.optimizer.reload()
    if training.averages is not None and not averages:
        training.averages.forget()
    progress = comparable(Progress.from_state(state, config), state["reading"], config)
    remark = _remark(progress, state, config, folder) + dropped + remark
    for reason in checkpoint.passed_over:
        remark += f"; passed over {reason}"
    return progress, remark, folder


def _averages(
    training: Training, checkpoint: Checkpoint, updated: bool
) -> tuple[dict[str, Any], str]:
    """Averaged weights to be read, and a remark where they begin again.

    ``updated``: whether the optimizer is read, and has made updates.
    """
    if training.averages is None or not updated:
        return {}, ""
    prefix = f"optimizer.{AVERAGE}."
    if any(name.startswith(prefix) for name in checkpoint.manifest.records):
        return dict(training.averages.wanted()), ""
    return {}, "; optimizer.weight_average begins with the next update"


def going_on(config: Config, mesh: Mesh) -> Config:
    """The config of a run that resumes where ``checkpoints_path`` has checkpoints of it.

    So the same command starts a run and resumes it. A checkpoint in that folder that the
    config names counts as given: the run is set back, but not by a launcher that starts it again.
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
        return has_manifests(folder) or (sent and (folder / "metrics.jsonl").exists())

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


def _check_state(state: dict[str, Any], config: Config, folder: Path) -> None:
    needed = (*NEEDED, "optimizer_steps", "model_config", "reading")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(
            f"{folder} cannot be resumed: its state lacks {', '.join(missing)}; was it written by "
            "this version of apps/train?"
        )
    given = _model_of(config)
    rope = ROPE if config.checkpoints.accept_changed_rope else ()
    changed = [
        f"{name} is {given.get(name)!r} in the config and {value!r} in the checkpoint"
        for name, value in {"multipliers": None, **state["model_config"]}.items()
        if name not in (*NO_EFFECT, *rope)
        and not name.startswith("is_")
        and _uncut(name, given.get(name)) != _uncut(name, value)
    ]
    if changed:
        hint = (
            ""
            if not any(line.startswith(ROPE) for line in changed)
            else (
                "; --set checkpoints.accept_changed_rope=true extends the context of the checkpoint"
            )
        )
        problems = "; ".join(changed) + hint
        raise ValueError(f"{folder} is of another model: model.model_config.{problems}")


def _model_of(config: Config) -> dict[str, Any]:
    """What a checkpoint of this config says of its model, as JSON has it: tuples are lists."""
    return json.loads(json.dumps(model_to_json(config.model.model_config, config.multipliers)))


def _uncut(name: str, value: Any) -> Any:
    """A value of ``model_config``; layers as text without the cuts into stages."""
    return value.replace("|", "") if name == "layers" and isinstance(value, str) else value


def _remark(progress: Progress, state: dict[str, Any], config: Config, folder: Path) -> str:
    remark = f"Resumed after step {progress.step} from {folder}"
    now = order_of(reading_of(config))
    for name, before in order_of(state["reading"]).items():
        if now.get(name) != before:
            remark += f"; {name} changes from {before} to {now.get(name)}"
            if name not in ("global_batch_size", "batch_ramp"):
                remark += ": samples may come twice or not at all"
    sizes, before = _model_of(config), state["model_config"]
    for name in ROPE:
        if name in before and sizes.get(name) != before[name]:
            remark += f"; {name} changes from {before[name]} to {sizes.get(name)}"
    if progress.step >= config.tokens.train_steps:
        remark += f"; nothing is left to do: tokens.train_steps is {config.tokens.train_steps}"
    return remark
