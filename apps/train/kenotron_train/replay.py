"""Make one step again, from the newest checkpoint before it, and look at its gradient."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron_ckpt.folder import defect, steps_in
from kenotron_ckpt.together import on_first
from kenotron_data import Batch, Cursor
from kenotron_dist import Mesh
from kenotron_optim import NonFinite, find_nonfinite
from kenotron_train.assemble import Training, build_training
from kenotron_train.availability import check_available
from kenotron_train.blame import FOLDER, Blame, blame, samples_of
from kenotron_train.config import Config
from kenotron_train.feed import Feed
from kenotron_train.own_data import Hook, check_hook
from kenotron_train.progress import Progress
from kenotron_train.report import Report
from kenotron_train.resume import resume
from kenotron_train.step import gradient, training_step
from kenotron_train.vocabulary import check_vocabulary

SHOWN = 5
"""Parameters with the largest gradients that the log lists."""


def replay(mesh: Mesh, config: Config, step: int, loader: Hook | None = None) -> dict[str, Any]:
    """Make step ``step`` of a run again without its update; what was found, on every rank.

    The run goes from its newest checkpoint before the step, or from its beginning; on the same
    layout every bit is as it was. Steps before it that are not finite are skipped. No checkpoint
    and no metrics of the run change: ``nonfinite/replay-<step>`` below its folder gets the
    replay's. Collective over the mesh. Raises ValueError for a step that the run has not.
    """
    check_available(config)
    check_hook(config, loader)
    check_vocabulary(config)
    if not 1 <= step <= config.tokens.train_steps:
        raise ValueError(
            f"--replay-step {step}: the run has steps 1 to tokens.train_steps, "
            f"{config.tokens.train_steps}"
        )
    run = Path(config.checkpoints.checkpoints_path)
    training = build_training(_apart(config, run, step, mesh), mesh)
    progress, remark = resume(training)
    with Report(training.config, mesh) as report:
        report.begin(progress.step + 1)
        report.say(f"Replay of step {step}. {remark}")
        feed = Feed(training, report, loader, None)
        try:
            batch, place, progress = _advance(training, feed, report, progress, step)
        finally:
            feed.close()
        found = _look(training, batch, place, progress)
        for line in _lines(found, run):
            report.say(line)
    if mesh.rank == 0:
        path = Path(training.config.checkpoints.checkpoints_path) / f"step-{step}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _apart(config: Config, run: Path, step: int, mesh: Mesh) -> Config:
    """The run from the checkpoint before the step, with a folder of its own."""

    def newest() -> int | None:
        steps = steps_in(run) if run.is_dir() else []
        whole = [each for each in steps if each < step and not defect(run / str(each))]
        return max(whole, default=None)

    checkpoints, before = config.checkpoints, on_first(mesh, newest)
    if before is not None:
        checkpoints = replace(
            checkpoints,
            resume_checkpoint_path=str(run / str(before)),
            load_optimizer=True,
            load_lr_scheduler=True,
        )
    apart = replace(checkpoints, checkpoints_path=str(run / FOLDER / f"replay-{step}"))
    optimizer = replace(config.optimizer, nonfinite="skip")
    return replace(config, checkpoints=apart, optimizer=optimizer)


def _advance(
    training: Training, feed: Feed, report: Report, progress: Progress, last: int
) -> tuple[Batch, Cursor, Progress]:
    """Make the steps before ``last``; its batch, where that begins, and how far the run is."""
    if progress.step >= last:
        raise ValueError(f"--replay-step {last}: the run starts after step {progress.step}")
    while True:
        stage, step = feed.stage(progress), progress.step + 1
        place = stage.loader.cursor
        batch = stage.next_batch(step).to(training.mesh.device)
        if place in progress.left_out:
            progress = progress.past(stage.loader.cursor)
            continue
        if step == last:
            return batch, place, progress
        start, scale = progress.schedule_start, progress.loss_scale
        result = training_step(training, batch, step, schedule_start=start, loss_scale=scale)
        progress = progress.after(training.config, stage.loader.cursor, result.loss_scale)
        report.say(f"step {step} again: lm_loss {result.loss:.6g}")


def _look(training: Training, batch: Batch, place: Cursor, progress: Progress) -> dict[str, Any]:
    """The step's loss, norms, and what is not finite. Collective over the mesh."""
    step = progress.step + 1
    grad = gradient(training, batch, step, progress.loss_scale)
    norms = training.norm.norms(grad.slices)
    bad = find_nonfinite(training.norm, grad.slices, grad.norm, grad.loss.item())
    if bad is not None:
        said = blame(training, batch, step, place, bad)
    else:
        whole = NonFinite(grad.loss.item(), None)
        said = Blame(step, place, samples_of(batch, training.mesh), "", whole)
    gradients = {name: repr(norm) for name, norm in norms.items()}
    return said.to_dict() | {"grad_norm": repr(grad.norm.item()), "grad_norms": gradients}


def _lines(found: dict[str, Any], run: Path) -> list[str]:
    """What the log says of a replay."""
    lines = [f"loss {found['loss']}, norm of the gradient {found['grad_norm']}"]
    if found["module"]:
        lines.append(f"not finite: first module {found['module']}, parameter {found['parameter']}")
    largest = sorted(found["grad_norms"].items(), key=lambda item: -_order(float(item[1])))
    lines += [f"gradient of {name}: norm {norm}" for name, norm in largest[:SHOWN]]
    record = run / FOLDER / f"step-{found['step']}.json"
    if record.exists():
        before = json.loads(record.read_text())
        same = [key for key in ("samples", "loss", "parameter") if before[key] == found[key]]
        lines.append(f"as in {record}: {', '.join(same) or 'nothing'}")
    return lines


def _order(norm: float) -> float:
    return norm if norm == norm else float("inf")  # nan first
