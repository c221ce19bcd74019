"""The folder of a run as a start finds it: begun or not, and whether its parts agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kenotron_ckpt import (
    MANIFEST,
    CheckpointsConfig,
    S3UploadConfig,
    contradiction,
    has_manifests,
    is_url,
    on_first,
    steps_in,
    unfinished,
)
from kenotron_dist import Mesh
from kenotron_dist.launch import restarts
from kenotron_nanotron import is_nanotron
from kenotron_train.log.metrics_file import last_step
from kenotron_train.run.upload import upload_url

METRICS = "metrics.jsonl"


def going_on(
    checkpoints: CheckpointsConfig, upload: S3UploadConfig | None, mesh: Mesh
) -> CheckpointsConfig:
    """Return the section of a run that resumes where ``checkpoints_path`` has checkpoints of it.

    So the same command starts a run and resumes it. A checkpoint in that folder that the
    config names counts as given: the run is set back, but not by a launcher that starts it again.
    Collective over the mesh.

    Raises:
        ValueError: the folder has checkpoints of Nanotron, or parts of checkpoints that do not
            agree with one another (``check_agreement``).
    """
    folder = Path(checkpoints.checkpoints_path)
    if theirs := on_first(mesh, lambda: _of_nanotron(folder)):
        raise ValueError(
            f"checkpoints.checkpoints_path: {folder} has checkpoints of Nanotron ({theirs}), which "
            "would be written over: give another folder; `python -m kenotron_nanotron` "
            "makes a checkpoint there that resume_checkpoint_path may name"
        )
    sent = upload is not None and upload.remove_after_upload

    def has_begun() -> bool:
        return has_manifests(folder) or (sent and (folder / METRICS).exists())

    begun = on_first(mesh, has_begun)
    if not sent:
        check_agreement(checkpoints, mesh, metrics=upload_url(upload) is None)
    if sets_back(checkpoints) or not begun:
        return checkpoints
    return replace(
        checkpoints,
        resume_checkpoint_path=str(folder),
        load_optimizer=True,
        load_lr_scheduler=True,
    )


def without_effect(checkpoints: CheckpointsConfig) -> str:
    """Return a remark on keys that a run which resumes from its own folder does not follow.

    They are for the checkpoint that ``resume_checkpoint_path`` names: a run that is started again
    with the same config needs the optimizer that it has saved.

    Args:
        checkpoints: the section as it was given, of a run that resumes from its own folder.
    """
    keys = ("load_optimizer", "load_lr_scheduler")
    named = [f"checkpoints.{key}: false" for key in keys if not getattr(checkpoints, key)]
    if not named or checkpoints.resume_checkpoint_path is not None:
        return ""
    return (
        f"; {' and '.join(named)} had no effect: the run resumes from its own folder, where each "
        "start would do so again; to do it once, add checkpoints.resume_checkpoint_path: "
        f"{checkpoints.checkpoints_path} to this start alone"
    )


def check_agreement(checkpoints: CheckpointsConfig, mesh: Mesh, *, metrics: bool = True) -> None:
    """Refuse a run folder whose parts contradict one another. Collective over the mesh.

    A run that was killed in its first save leaves no ``latest.txt``, the shards of one step, and
    metrics up to that step: it starts afresh. ``metrics``: compare them with the checkpoints, too;
    a run that resumed in place from the store that it uploads to has metrics before checkpoints.

    Raises:
        ValueError: naming what the folder says of itself and what it does not have.
    """
    folder, given = Path(checkpoints.checkpoints_path), checkpoints.resume_checkpoint_path
    if given is not None and is_url(given):
        return

    def find() -> str:
        if found := contradiction(folder):
            return found
        interval = checkpoints.checkpoint_interval
        ahead = metrics and not has_manifests(folder)
        return _metrics_ahead(interval, folder) if ahead else ""

    if found := on_first(mesh, find):
        raise ValueError(
            f"checkpoints.checkpoints_path: {folder}: {found}. The folder may be a copy that is "
            "under way, or was cut off. Nothing was changed: complete the copy and start again, or "
            "start afresh in a new checkpoints.checkpoints_path"
        )


def _metrics_ahead(interval: int, folder: Path) -> str:
    """Return how metrics and checkpoints differ in a folder without a manifest; empty: not."""
    path = folder / METRICS
    last = last_step(path) if path.exists() else 0
    for step in unfinished(folder):
        if not step - 1 <= last < step + interval:
            said = f"ends with step {last}" if last else "has no step"
            return f"step {step} has shards and no {MANIFEST}, but {METRICS} {said}"
        return ""
    if last >= 2 * interval:
        return (
            f"{METRICS} ends with step {last} and there is no checkpoint, though "
            f"checkpoints.checkpoint_interval is {interval}"
        )
    return ""


def sets_back(checkpoints: CheckpointsConfig) -> bool:
    """Return whether a start names a checkpoint of its own folder: the run is set back to it.

    It is not by a launcher that starts it again.
    """
    given = checkpoints.resume_checkpoint_path
    own = given is not None and is_step_of(Path(given), Path(checkpoints.checkpoints_path))
    return own and restarts() == 0


def is_step_of(path: Path, folder: Path) -> bool:
    """Return True for a run folder itself and each of its steps."""
    path, folder = path.resolve(), folder.resolve()
    return path == folder or (path.parent == folder and path.name.isdecimal())


def _of_nanotron(folder: Path) -> str:
    """Return the newest step folder that is Nanotron's; empty when none is."""
    steps = steps_in(folder) if folder.is_dir() else []
    theirs = [str(step) for step in steps if is_nanotron(folder / str(step))]
    return theirs[-1] if theirs else ""
