"""Make one step again, from the newest checkpoint before it, and look at its gradient."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron_ckpt import CheckpointsConfig, defect, has_manifests, on_first, steps_in
from kenotron_config import Config
from kenotron_data import Cursor
from kenotron_dist import Mesh
from kenotron_engine import gradient, training_step
from kenotron_optim import NonFinite, find_nonfinite
from kenotron_train.assemble import OwnModel, TrainingRun, build_training, data_plan
from kenotron_train.data.own_data import Hook, check_hook
from kenotron_train.data.stage_loader import StageLoader
from kenotron_train.data.vocabulary import check_vocabulary
from kenotron_train.failures.nonfinite_folder import FOLDER, read_record
from kenotron_train.failures.nonfinite_record import TakenBatch
from kenotron_train.log.report import Report, open_report
from kenotron_train.progress import Progress
from kenotron_train.replay.replay_comparison import Comparison, compared, comparison
from kenotron_train.run.resume import resume

SHOWN = 5
"""Parameters with the largest gradients that the log lists."""


def replay(
    mesh: Mesh,
    config: Config,
    what: int | Path,
    loader: Hook | None = None,
    model: OwnModel | None = None,
) -> dict[str, Any]:
    """Make a step of a run again without its update; what was found, on every rank.

    ``what`` is a number: the step as the run has it now, after it may have gone back. Or it is the
    path of a record in ``nonfinite``: that step, also if the run has undone it.

    The run goes from its newest checkpoint before the step, or from its beginning; on the same
    layout every bit is as it was, on an accelerator with ``general.deterministic``. Steps before it
    that are not finite are skipped. No checkpoint and no metrics of the run change:
    ``nonfinite/replay-<step>`` below its folder gets the replay's. Collective over the mesh.
    Raises ValueError for a step that the run has not, and for a file that is no record.
    """
    check_hook(config.data_stages, loader)
    check_vocabulary(data_plan(config))
    record, name, step = _asked(what, mesh)
    if not 1 <= step <= config.tokens.train_steps:
        raise ValueError(
            f"--replay-step {step}: the run has steps 1 to tokens.train_steps, "
            f"{config.tokens.train_steps}"
        )
    run = Path(config.checkpoints.checkpoints_path)
    apart = replace(
        config,
        checkpoints=_apart(config.checkpoints, run, step, name, mesh),
        optimizer=replace(config.optimizer, nonfinite="skip"),
    )
    training = build_training(apart, mesh, model)
    progress, remark = resume(training, run)
    if record is not None:
        left_out = tuple(map(Cursor.from_dict, record["left_out"]))
        progress = replace(progress, left_out=left_out)
        remark += f"; from there on as {what} has it"
    with open_report(training) as report:
        report.begin(progress.step + 1)
        report.say(f"Replay of step {step}. {remark}")
        feed = StageLoader(training, report, loader, None)
        try:
            found = _look(training, _advance(training, feed, report, progress, step))
        finally:
            feed.close()
        how = comparison(mesh.device.type, config.general.is_deterministic(mesh.device.type))
        found["comparison"] = str(how)
        for line in _lines(found, run, how):
            report.say(line)
    if mesh.rank == 0:
        path = training.log.folder / f"step-{name}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def step_or_record(text: str) -> int | Path:
    """Read what ``--replay-step`` names: the number of a step, or the file of a record."""
    try:
        return int(text)
    except ValueError:
        return Path(text)


def _asked(what: int | Path, mesh: Mesh) -> tuple[dict[str, Any] | None, str, int]:
    """The record that is asked for, if one is; a name for its folder; the step."""
    if isinstance(what, int):
        return None, str(what), what
    record = on_first(mesh, lambda: read_record(what))
    return record, what.stem.removeprefix("step-"), int(record["step"])


def _apart(
    checkpoints: CheckpointsConfig, run: Path, step: int, name: str, mesh: Mesh
) -> CheckpointsConfig:
    """The run from the checkpoint before the step, with a folder of its own."""

    def newest() -> int | None:
        steps = [each for each in steps_in(run) if each < step] if run.is_dir() else []
        faults = {each: defect(run / str(each)) for each in steps}
        whole = [each for each, fault in faults.items() if not fault]
        if not whole and has_manifests(run, steps):
            reasons = [f"{run / str(each)}: {fault}" for each, fault in faults.items()]
            raise ValueError(
                "\n  ".join(
                    [f"--replay-step {step}: no checkpoint before it can be read:", *reasons]
                )
            )
        return max(whole, default=None)

    before = on_first(mesh, newest)
    if before is not None:
        checkpoints = replace(
            checkpoints,
            resume_checkpoint_path=str(run / str(before)),
            load_optimizer=True,
            load_lr_scheduler=True,
        )
    return replace(checkpoints, checkpoints_path=str(run / FOLDER / f"replay-{name}"))


def _advance(
    training: TrainingRun, feed: StageLoader, report: Report, progress: Progress, last: int
) -> TakenBatch:
    """Make the steps before ``last``; its batch."""
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
            return TakenBatch(batch, stage, replace(progress, cursor=place))
        result = training_step(
            training,
            batch,
            step,
            schedule_start=progress.schedule_start,
            state=progress.state,
            objective=stage.objective(replace(progress, cursor=place)),
        )
        progress = progress.after(stage.loader.cursor, result, stage.sequence)
        report.say(f"step {step} again: lm_loss {result.loss:.6g}")


def _look(training: TrainingRun, taken: TakenBatch) -> dict[str, Any]:
    """The step's loss, norms, and what is not finite. Collective over the mesh."""
    progress = taken.progress
    grad = gradient(
        training,
        taken.batch,
        progress.step + 1,
        progress.state,
        objective=taken.stage.objective(progress),
    )
    norms = training.norm.norms(grad.slices)
    bad = find_nonfinite(training.norm, grad.slices, grad.norm, grad.loss.item())
    if bad is not None:
        said = taken.blame(training, bad)
    else:
        said = taken.about(training, "", NonFinite(grad.loss.item(), None))
    gradients = {name: repr(norm) for name, norm in norms.items()}
    return said.to_dict() | {"grad_norm": repr(grad.norm.item()), "grad_norms": gradients}


def _lines(found: dict[str, Any], run: Path, how: Comparison) -> list[str]:
    """Lines in the log about a replay."""
    lines = [f"loss {found['loss']}, norm of the gradient {found['grad_norm']}"]
    if found["module"]:
        lines.append(f"not finite: first module {found['module']}, parameter {found['parameter']}")
    largest = sorted(found["grad_norms"].items(), key=lambda item: -_order(float(item[1])))
    lines += [f"gradient of {name}: norm {norm}" for name, norm in largest[:SHOWN]]
    return lines + compared(found, run, how)


def _order(norm: float) -> float:
    return norm if norm == norm else float("inf")  # nan first
