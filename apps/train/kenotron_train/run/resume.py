"""Going on with a run, on any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron_ckpt import (
    Checkpoint,
    CheckpointsConfig,
    HostCopies,
    Location,
    NoCheckpoint,
    Store,
    has_manifests,
    is_url,
    on_first,
    read_preferred,
)
from kenotron_engine import changed_conditions
from kenotron_optim import AVERAGE, StepState
from kenotron_train.assemble import TrainingRun
from kenotron_train.data.changed_data import comparable
from kenotron_train.data.data_settings import order_of, reading_of
from kenotron_train.failures.passing_errors import PassingError, names_passing
from kenotron_train.failures.skipped_batches import left_out_since
from kenotron_train.progress import NEEDED, Progress, fresh_state
from kenotron_train.run.adapters import check_adapter, check_base
from kenotron_train.run.changed_config import changed_config
from kenotron_train.run.initial import load_base, load_initial
from kenotron_train.run.memory_folder import MemoryFolder, is_own, newer_in_memory
from kenotron_train.run.own_folder import check_agreement, sets_back, without_effect
from kenotron_train.run.same_model import ROPE, check_model, check_numbers, model_of
from kenotron_train.run.saved_tensors import check_module, check_optimizer, converted
from kenotron_train.run.upload import place_to_resume, upload_url

NAMES = {"held_out": "holding samples out (tokens.limit_val_batches)"}
"""Labels of parts of a reading whose names say too little."""


def resume(
    training: TrainingRun,
    run: Path | None = None,
    asked: CheckpointsConfig | None = None,
    memory: MemoryFolder | None = None,
) -> tuple[Progress, str]:
    """Load the checkpoint that the config names; how far it is, and a sentence about it.

    Where there is none, the weights that ``model.init_method`` may name are loaded. What the run
    in the folder ``run`` (default: ``checkpoints_path``) has left out since it went back to that
    checkpoint stays left out. ``asked`` is the section before ``going_on``, ``memory`` the folder
    with copies of this run, which may be newer. Collective over the mesh. Raises FileNotFoundError
    or ValueError when there is none, when it is damaged, of another model, or not of a training
    run, and PassingError when none could be read and an error that may pass is among the reasons.
    """
    mesh, checkpoints = training.mesh, training.checkpoints.section
    given = place_to_resume(checkpoints, training.checkpoints.upload, mesh)
    back = asked is not None and sets_back(asked)  # what memory has is left behind
    found, stale = _from_memory(training, None if back else memory, given)
    if found is not None:
        return found
    if given is None:
        return Progress(state=_fresh(training)), load_initial(training)
    own = not is_url(given) and Path(given) == Path(checkpoints.checkpoints_path)
    if own and not on_first(mesh, lambda: has_manifests(Path(given))):
        check_agreement(checkpoints, mesh)
        begun = load_initial(training)
        afresh = f"No checkpoint in {given} yet: the run starts afresh"
        return Progress(state=_fresh(training)), afresh + (f"; {begun}" if begun else "")
    try:
        progress, remark, step = load_run(training, given, optimizer=checkpoints.load_optimizer)
    except NoCheckpoint as error:
        failure = PassingError if names_passing(str(error)) else ValueError
        raise failure(_unreadable(str(error), own)) from error
    if not checkpoints.load_lr_scheduler:
        progress = replace(progress, schedule_start=progress.step)
    run = Path(checkpoints.checkpoints_path) if run is None else run
    progress, more = left_out_since(run, step, progress, mesh)
    if own and asked is not None:
        more += without_effect(asked)
    return progress, remark + stale + more


def _from_memory(
    training: TrainingRun, memory: MemoryFolder | None, given: str | None
) -> tuple[tuple[Progress, str] | None, str]:
    """Load the copy in memory; None where it is not newer than ``given``, or damaged.

    Returns a remark on a copy that is not taken, too. Raises ValueError where it is damaged and
    there is no other checkpoint of this run: tensors that it filled are no first weights.
    """
    mesh, checkpoints = training.mesh, training.checkpoints.section
    url = upload_url(training.checkpoints.upload)
    if memory is None:
        return None, ""
    copy, missing = memory.newest(mesh)
    is_newer, stale = on_first(
        mesh, lambda: newer_in_memory(copy, memory.path, checkpoints, url, given)
    )
    if not is_newer:
        return None, stale + missing
    try:
        progress, remark, step = load_run(training, memory.path, copies=memory.hosts)
    except NoCheckpoint as error:
        if given is not None and is_own(checkpoints, url, given):
            return None, ""
        alone = f"{error}\nThe run has no other checkpoint: remove {memory.path}"
        raise ValueError(alone) from error
    progress, more = left_out_since(Path(checkpoints.checkpoints_path), step, progress, mesh)
    return (progress, remark + more), ""


def _fresh(training: TrainingRun) -> StepState:
    return fresh_state(training.optim, training.plan.dtype, training.data.doremi)


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
    training: TrainingRun,
    path: Location,
    *,
    optimizer: bool = True,
    copies: HostCopies | None = None,
) -> tuple[Progress, str, Store]:
    """Load a checkpoint, the newest that is undamaged of a run folder.

    Bytes are verified while they are read: a damaged checkpoint may fill tensors before its damage
    is found, and the next one then fills all of them again. Returns how far it is, a sentence about
    it, and its step folder. Without ``optimizer`` that begins afresh. ``copies``: in the memories
    of several hosts, to be read instead of the path. Collective over the mesh.

    Raises NoCheckpoint when there is none that can be read: then the tensors may be NaN, and must
    not be trained on or saved. Raises ValueError when it is of another model, or
    not of a training run.
    """

    def load(found: Checkpoint) -> tuple[Progress, str, Store]:
        return _load_from(training, found, optimizer)

    with training.mesh.pulse.busy("loading a checkpoint"):
        return copies.read(load) if copies else read_preferred(path, training.mesh, load)


def _load_from(
    training: TrainingRun, checkpoint: Checkpoint, optimizer: bool
) -> tuple[Progress, str, Store]:
    """``load_run`` of one checkpoint. Raises DamagedCheckpoint, perhaps after tensors changed."""
    mesh, model = training.mesh, training.checkpoints.model
    folder, manifest = checkpoint.store, checkpoint.manifest
    state = dict(manifest.state)
    _check_state(state, manifest.step, folder)
    rope = training.checkpoints.section.accept_changed_rope
    saved = check_adapter(state["model_config"], model, folder)
    check_model(saved, model, folder, accepts_rope=rope)
    steps = int(state["optimizer_steps"])
    if model.adapter is not None:
        load_base(training)
        check_base(state["model_config"], training, folder)
    parameters: dict[str, Any] = dict(training.saved_records())
    wanted: dict[str, Any] = {}
    dropped = check_module(model.mtp is not None, folder, manifest.records)
    averages, remark = _averages(training, checkpoint, optimizer and steps > 0)
    if optimizer:
        # Before its first update an optimizer has masters and no more: what a damaged checkpoint
        # left in other state is zero again.
        wanted = training.optimizer.wanted(started=steps > 0)
        rule = training.optim.optimizer_factory.name
        names = [layout.name for _, layout in (parameters | wanted | averages).values()]
        dropped += check_optimizer(names, manifest.records, rule, folder, mesh)
        dropped += converted(wanted, manifest.records)
    checkpoint.load(parameters)
    training.check_replicas()  # of a rank with old weights, before owners of slices publish theirs
    if wanted := wanted | averages:  # later: an fp32 parameter shares its memory with its master
        checkpoint.load(wanted)
    if optimizer:
        training.optimizer.steps = steps
        training.optimizer.publish()
    else:
        training.optimizer.reload()
    if training.averages is not None and not averages:
        training.averages.forget()
    reading = reading_of(training.data)
    progress = comparable(Progress.from_state(state, _fresh(training)), state["reading"], reading)
    remark = _remark(training, progress, state, folder) + dropped + remark
    if mesh.rank == 0:  # which prints it
        steps, seed = training.data.tokens.train_steps, training.plan.seed
        remark += changed_config(progress, training.schedule, steps, seed, manifest.config)
    for reason in checkpoint.passed_over:
        remark += f"; passed over {reason}"
    return progress, remark, folder


def _averages(
    training: TrainingRun, checkpoint: Checkpoint, updated: bool
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


def _check_state(state: dict[str, Any], step: int, folder: Store) -> None:
    needed = (*NEEDED, "optimizer_steps", "model_config", "reading")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(
            f"{folder} cannot be resumed: its state lacks {', '.join(missing)}; was it written by "
            "this version of apps/train?"
        )
    check_numbers(state, step, folder)


def _remark(training: TrainingRun, progress: Progress, state: dict[str, Any], folder: Store) -> str:
    remark = f"Resumed after step {progress.step} from {folder}"
    now = order_of(reading_of(training.data))
    for name, before in order_of(state["reading"]).items():
        if now.get(name) != before:
            remark += f"; {NAMES.get(name, name)} changes from {before} to {now.get(name)}"
            if name not in ("global_batch_size", "batch_ramp"):
                remark += ": samples may come twice or not at all"
    sizes, before = model_of(training.checkpoints.model), state["model_config"]
    for name in ROPE:
        if name in before and sizes.get(name) != before[name]:
            remark += f"; {name} changes from {before[name]} to {sizes.get(name)}"
    remark += changed_conditions(state.get("reproducible"), training.checkpoints.conditions)
    if progress.step >= (last := training.data.tokens.train_steps):
        remark += f"; nothing is left to do: tokens.train_steps is {last}"
    return remark
