"""Saving a run, and going on with it on any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_ckpt import (
    BlockingSaver,
    DataStatesConfig,
    Saver,
    latest_step,
    open_checkpoint,
)
from kenotron_data import Cursor
from kenotron_data.config import DatasetStageConfig
from kenotron_dist import TensorLayout, check_replicas, named_parameters
from kenotron_train.assemble import Training, model_records
from kenotron_train.config import Config
from kenotron_train.initial import load_initial
from kenotron_train.upload import Uploads, local_copy
from kenotron_train.vocabulary import BYTES
from kenotron_train.yaml_config import dump_config

NO_EFFECT = ("initializer_range", "max_position_embeddings", "pad_token_id", "pretraining_tp")
"""Fields of a model that may differ between a checkpoint and the config that resumes it."""
NO_EFFECT += ("use_cache", "bos_token_id", "eos_token_id")

HOW_IT_IS_MADE = ("dataset_processing_num_proc_per_process", "dataset_overwrite_cache")
"""Fields of a data set that change neither its samples nor their order."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    """Place in the data."""
    samples: int = 0
    """Samples read in all, over all ranks and stages."""
    tokens: int = 0
    epoch_known: bool = True
    """False: the checkpoint is another program's, and the size of the data set tells the epoch."""
    schedule_start: int = 0
    """The step after which the learning-rate schedule began."""

    def after(self, config: Config, cursor: Cursor) -> Progress:
        """One step later."""
        return Progress(
            self.step + 1,
            cursor,
            self.samples + config.global_batch_size,
            self.tokens + config.batch_tokens(cursor.stage),
            schedule_start=self.schedule_start,
        )


def open_saver(training: Training, uploads: Uploads) -> Saver:
    """The engine that ``checkpoints.checkpointing_engine`` names, on ``checkpoints_path``.

    Collective over the mesh. Raises ValueError when another run writes there, OSError when nobody
    can.
    """
    checkpoints = training.config.checkpoints
    engine = Saver if checkpoints.checkpointing_engine == "datastates" else BlockingSaver
    pool = checkpoints.datastates or DataStatesConfig()
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
        "step": progress.step,
        "optimizer_steps": training.optimizer.steps,
        "schedule_start": progress.schedule_start,
        "cursor": progress.cursor.to_dict(),
        "consumed_train_samples": progress.samples,
        "consumed_tokens": progress.tokens,
        "model_config": asdict(config.model.model_config),
        "dtype": config.model.dtype,
        "sequence_length": config.longest_sequence,
        "tokenizer": tokenizer_state(config),
        "reading": _reading(config),
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
        return Progress(), load_initial(training)
    if given == Path(checkpoints.checkpoints_path) and not _has_checkpoint(given):
        begun = load_initial(training)
        afresh = f"No checkpoint in {given} yet: the run starts afresh"
        return Progress(), afresh + (f"; {begun}" if begun else "")
    try:
        with mesh.pulse.busy("verifying a checkpoint"):
            checkpoint = open_checkpoint(given, mesh, select=_counts(checkpoints.load_optimizer))
    except ValueError as error:
        fix = "; correct it, or set it to null to start afresh"
        raise ValueError(f"checkpoints.resume_checkpoint_path: {error}{fix}") from error
    folder, manifest = checkpoint.folder, checkpoint.manifest
    state = dict(manifest.state)
    _check_state(state, config, folder)
    steps = int(state["optimizer_steps"])
    parameters: dict[str, Any] = dict(model_records(training.model))
    wanted: dict[str, Any] = {}
    dropped = ""
    if checkpoints.load_optimizer:
        # Before its first update an optimizer has masters and no more.
        wanted = training.optimizer.wanted(started=steps > 0)
        names = [layout.name for _, layout in (parameters | wanted).values()]
        dropped = _check_optimizer(names, manifest.records, config, folder)
    with mesh.pulse.busy("loading a checkpoint"):
        checkpoint.load(parameters)
        if wanted:  # after the parameters: an fp32 one shares its memory with its master
            checkpoint.load(wanted)
    if checkpoints.load_optimizer:
        training.optimizer.steps = steps
        training.optimizer.publish()
    else:
        training.optimizer.reload()
    progress = Progress(
        int(state["step"]),
        Cursor.from_dict(state["cursor"]),
        int(state["consumed_train_samples"]),
        int(state["consumed_tokens"]),
        epoch_known="imported" not in state,
        schedule_start=int(
            state.get("schedule_start", 0) if checkpoints.load_lr_scheduler else state["step"]
        ),
    )
    remark = _remark(progress, state, config, folder) + fetched + dropped
    for reason in checkpoint.passed_over:
        remark += f"; passed over {reason}"
    return progress, remark


def _counts(load_optimizer: bool) -> Callable[[str], bool]:
    """Which records must be right for a checkpoint to be resumed."""
    return lambda name: load_optimizer or not name.startswith("optimizer.")


def earlier_run(config: Config) -> str:
    """A warning when a fresh run starts in a folder that has checkpoints; empty otherwise."""
    folder = Path(config.checkpoints.checkpoints_path)
    if not _has_checkpoint(folder):
        return ""
    return (
        f"{folder} has checkpoints of an earlier run, up to step {latest_step(folder)}: this run "
        "starts afresh and replaces those of the same steps; set checkpoints.checkpoints_path to "
        "keep them apart"
    )


def _has_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and latest_step(folder) is not None


def _check_state(state: dict[str, Any], config: Config, folder: Path) -> None:
    needed = ("step", "optimizer_steps", "cursor", "consumed_train_samples", "consumed_tokens")
    missing = [key for key in (*needed, "model_config", "reading") if key not in state]
    if missing:
        raise ValueError(
            f"{folder} cannot be resumed: its state lacks {', '.join(missing)}; was it written by "
            "this version of apps/train?"
        )
    given = asdict(config.model.model_config)
    changed = [
        f"{name} is {given.get(name)!r} in the config and {value!r} in the checkpoint"
        for name, value in state["model_config"].items()
        if name not in NO_EFFECT and given.get(name) != value
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


def _reading(config: Config) -> dict[str, Any]:
    """What the place in the data refers to: with other values samples are skipped or repeated."""
    return {
        "global_batch_size": config.global_batch_size,
        "sequence_length": config.tokens.sequence_length,
        "held_out": config.tokens.limit_val_batches > 0,
        "data_stages": [_stage_reading(stage) for stage in config.data_stages],
        "tokenizer": tokenizer_state(config),
    }


def _stage_reading(stage: DatasetStageConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": stage.data.seed, "dataset": None}
    if stage.data.dataset is not None:
        found["dataset"] = asdict(stage.data.dataset)
    if stage.sequence_length is not None:
        found["sequence_length"] = stage.sequence_length
    return found


def tokenizer_state(config: Config) -> dict[str, Any] | None:
    """What a checkpoint says of its tokenizer; None: bytes. A local path is made absolute."""
    section = config.tokenizer
    name = section.tokenizer_name_or_path
    if name is None and section.tokenizer_max_length is None:
        return None
    here = Path(name or BYTES)
    return {
        "name": str(here.resolve()) if name and here.exists() else name or BYTES,
        "revision": section.tokenizer_revision if name else None,
        "max_length": section.tokenizer_max_length,
    }


def _order(reading: dict[str, Any]) -> dict[str, Any]:
    """The part of a reading, ours or an imported one, that samples and their order follow from."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(v) for key, v in value.items() if key not in HOW_IT_IS_MADE}
        return [kept(each) for each in value] if isinstance(value, list) else value

    return kept(reading)


def _remark(progress: Progress, state: dict[str, Any], config: Config, folder: Path) -> str:
    remark = f"Resumed after step {progress.step} from {folder}"
    now = _order(_reading(config))
    for name, before in _order(state["reading"]).items():
        if now.get(name) != before:
            remark += f"; {name} changes from {before} to {now.get(name)}"
            if name != "global_batch_size":
                remark += ": samples may come twice or not at all"
    if progress.step >= config.tokens.train_steps:
        remark += f"; nothing is left to do: tokens.train_steps is {config.tokens.train_steps}"
    return remark
