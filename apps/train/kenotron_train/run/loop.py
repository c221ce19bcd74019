"""A run from its first step (or where it was stopped) to its last."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from kenotron_ckpt import CheckpointsConfig, SaveFailed
from kenotron_config import Config
from kenotron_data import Corpus
from kenotron_dist import Mesh, barrier
from kenotron_engine import DomainWeights, StepResult, Validation, training_step
from kenotron_models import TransformersSpec
from kenotron_optim import NonFinite
from kenotron_train.assemble import OwnModel, TrainingRun
from kenotron_train.data.own_data import Hook
from kenotron_train.data.stage_dataset import MaskTargets
from kenotron_train.evaluate.validation import validate
from kenotron_train.failures.nonfinite_record import TakenBatch
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.log.instrumentation import HISTORY, Look
from kenotron_train.progress import Progress
from kenotron_train.run.domain_weights import write_weights
from kenotron_train.run.host_memory import give_back_free_memory
from kenotron_train.run.recovery import go_back, goes_back, record, recorded
from kenotron_train.run.replacements import admit
from kenotron_train.run.sample import show_sample
from kenotron_train.run.sanity import check_batch, check_state
from kenotron_train.run.saving import check_saved, save_run
from kenotron_train.run.session import Session, open_session

FIRST_STEPS = 2
"""Steps after which replicas are compared where modules are cut by a plan of names."""


@dataclass(frozen=True)
class Outcome:
    """End of a run; the same on every rank."""

    results: list[StepResult]
    """Results of the last steps, ``HISTORY`` at most; those that were undone are not in it."""
    stopped: str = ""
    """Reason why it ended before its last step; empty when it did not."""


def train(
    mesh: Mesh,
    config: Config,
    sample: bool = False,
    loader: Hook | None = None,
    *,
    target_mask: MaskTargets | None = None,
) -> list[StepResult]:
    """``run`` to the end; returns what its last steps reported, ``HISTORY`` at most."""
    return run(mesh, config, sample, loader, target_mask=target_mask).results


def run(
    mesh: Mesh | None,
    config: Config,
    sample: bool = False,
    loader: Hook | None = None,
    *,
    target_mask: MaskTargets | None = None,
    deadline: float = math.inf,
    model: OwnModel | None = None,
    hooks: tuple[LifeCycle, ...] = (),
    leaves: bool = False,
    then: tuple[Config, ...] = (),
) -> Outcome:
    """Train by the config, until the last step or a signal, whichever comes first. Collective.

    It resumes where its folder has checkpoints (``going_on``). A signal ends it with a checkpoint.
    The run is a loop over sessions (``open_session``): its steps, and its results, continue from
    one to the next, which has a mesh of its own over the same processes.

    Args:
        mesh: of the sizes that the config names (None: the session makes one).
        config: the config.
        sample: end with a generated sample.
        loader: data of one's own for stages with ``dataset: null`` (see ``own_data.Hook``).
        target_mask: a mask of targets, for tests.
        deadline: of ``time.monotonic``: the run ends early enough to save.
        model: layers of one's own.
        hooks: called at moments of the run.
        leaves: the process ends afterwards: signals that come later do not change its status.
        then: configs of further sessions, each with a later last step and perhaps another layout.

    Raises:
        ValueError, FileNotFoundError: bad input.
        SaveFailed: the last checkpoint is not whole.
    """
    results: deque[StepResult] = deque(maxlen=HISTORY)
    stopped, progress = "", Progress()
    for number, each in enumerate((config, *then)):
        with open_session(
            each, None if number else mesh, loader, target_mask=target_mask, deadline=deadline,
            model=model, hooks=hooks,
        ) as session:  # fmt: skip
            if number and session.progress.step != progress.step:
                raise ValueError(
                    f"session {number + 1} begins after step {session.progress.step}, and the one "
                    f"before it ended after step {progress.step}: give the same "
                    "checkpoints.checkpoints_path, with save_final_state: true"
                )
            stopped, progress = _train(session, results)
            if sample and each.tokenizer.tokenizer_name_or_path is None and not stopped:
                show_sample(session.training, session.report)
            barrier(session.training.mesh.world)  # a launcher ends all when the first has left
            session.signals.finished = leaves and (bool(stopped) or number == len(then))
        del session  # its memory is free before the next one is built
        if stopped:
            break
    return Outcome(list(results), stopped)


def _train(session: Session, results: deque[StepResult]) -> tuple[str, Progress]:
    """Make the steps of a session, until all is written; why it stopped, and how far the run is."""
    training, progress = session.training, session.progress
    session.life.pre_training(training, progress)
    if training.checkpoints.section.save_initial_state and progress.step == 0:
        _save(session, progress)
    stopped, progress = _steps(session, progress, results)
    session.feed.close()
    _finish(session, stopped, progress)
    session.life.post_training(training, progress)
    return stopped, progress


def _finish(run: Session, stopped: str, progress: Progress) -> None:
    """Wait until all is written; read back what a run that was stopped leaves."""
    run.training.optimizer.settle()
    run.watching.finish()
    run.saver.finish()
    _say_saved(run)
    section, step = run.training.checkpoints.upload, progress.step
    if step in run.failed:
        raise SaveFailed(f"the run is over, but without its last checkpoint: {run.failed[step]}")
    if stopped:
        if section is None or not section.remove_after_upload:  # else its copy is read back
            check_saved(run.saver, step)
        run.report.say(f"Stopped after step {step}, all of it saved: {stopped}")
    run.uploads.finish()
    run.copies.remove()
    with run.training.mesh.pulse.busy("closing trackers"):
        run.report.close()


def _steps(run: Session, progress: Progress, results: deque[StepResult]) -> tuple[str, Progress]:
    """Make all steps that are left; why the run is stopped before the last, and how far it is."""
    training, report, stopper, watching = run.training, run.report, run.stopper, run.watching
    checkpoints, last = training.checkpoints.section, training.data.tokens.train_steps
    while progress.step < last and not (stopper.reason or watching.is_over):
        stage = run.feed.stage(progress)
        progress = progress.with_data(stage.number, stage.fingerprint)
        step, place = progress.step + 1, stage.loader.cursor
        if place in progress.left_out:
            stage.next_batch(step)
            progress = progress.past(stage.loader.cursor)
            continue
        with watching.step(step) as look:
            batch = watching.batch(partial(stage.next_batch, step))
            taken = TakenBatch(batch, stage, replace(progress, cursor=place))
            result = _step(run, taken, look)
        watching.rank_times.add(stopper.count_votes())
        if result.nonfinite and result.skipped and not result.overflow:
            report.say(f"step {step}: {record(training, taken, result.nonfinite)}")
        if goes_back(training, result) and result.nonfinite:
            progress = _return(run, taken.progress, result.nonfinite)
            for _ in range(min(len(results), step - 1 - progress.step)):
                results.pop()
            continue
        results.append(result.in_short())
        progress = progress.after(stage.loader.cursor, result, stage.sequence)
        validation = _validate(training, step, stage.corpus)
        run.life.post_train_step(training, progress, result)
        consumed = progress.tokens, progress.samples
        samples = progress.samples - taken.progress.samples
        figures = watching.figures(
            step, result, samples, consumed, validation, progress.state.figures
        )
        saves = _is_due(checkpoints, step, last) or stopper.save
        if saves or run.copies.is_due(step):
            report.hold(figures)
        if saves:
            watching.saving(partial(_save, run, progress))
        else:
            watching.saving(partial(run.copies.save, progress))
        held_out = partial(validate, training, stage.corpus.validation, averages=False)
        found = None
        if not stopper.reason:
            found = run.evaluations.after(step, saves, validation, held_out)
        watching.report(figures, found)
        _say_saved(run)
        run.uploads.say()
        run.slow.check(partial(_save_now, run, progress, saves))
        if (saves or run.copies.is_due(step)) and not stopper.reason and step < last:
            admit(run.waiting, training.mesh, report, partial(_finish_save, run, step, saves))
        if training.mesh.device.type == "cpu":
            give_back_free_memory(step)
    if stopper.reason and not _is_due(checkpoints, progress.step, last):
        _save(run, progress)
    return stopper.reason if progress.step < last else "", progress


def _step(run: Session, taken: TakenBatch, look: Look) -> StepResult:
    """One step, between the checks that the config asks for."""
    training, batch, progress = run.training, taken.batch, taken.progress
    step = progress.step + 1
    by_plan = isinstance(training.plan.spec, TransformersSpec) and step <= FIRST_STEPS
    if run.checked:
        check_batch(training, batch, step)
    with recorded(training, taken):
        result = training_step(
            training, batch, step, partial(_before_update, run), progress.schedule_start, look,
            progress.state, taken.stage.objective(progress),
        )  # fmt: skip
    if (run.checked or by_plan) and not goes_back(training, result):
        check_state(training, result, step)
    return result


def _before_update(run: Session) -> None:
    """Wait until no checkpoint reads parameters; start the vote to stop, which nothing waits for.

    Collective over the mesh.
    """
    run.watching.saving(run.saver.wait)
    run.watching.saving(run.copies.wait)
    run.stopper.vote(run.training.mesh, run.watching.row)


def _save(run: Session, progress: Progress) -> None:
    run.life.pre_save_checkpoint(run.training, progress)
    save_run(run.saver, run.training, progress)
    if (weights := progress.state.find(DomainWeights)) and run.training.mesh.rank == 0:
        if trouble := write_weights(run.saver.folder, progress.step, weights):
            run.report.say(trouble, "warning")


def _save_now(run: Session, progress: Progress, is_saved: bool) -> None:
    """Have a checkpoint of this step on the disk, which may have been begun (``is_saved``)."""
    if not is_saved:
        _save(run, progress)
    run.saver.finish()


def _finish_save(run: Session, step: int, is_saved: bool) -> bool:
    """Wait for the checkpoint of a step, or its copy in memory; return whether it is there."""
    if not is_saved:
        return run.copies.finish(step)
    run.saver.finish()
    _say_saved(run)
    return step not in run.failed


def _return(run: Session, progress: Progress, found: NonFinite) -> Progress:
    """Go back to the newest checkpoint: model, place in the data and metrics."""
    progress, about = go_back(run.training, run.saver, progress, found)
    run.copies.forget()
    _say_saved(run)
    run.feed.close()
    run.report.rewind(progress.step)
    run.report.say(about, "warning")
    return progress


def _validate(training: TrainingRun, step: int, corpus: Corpus) -> Validation | None:
    """Loss on held-out samples, where the config asks for it after this step."""
    tokens = training.data.tokens
    every, last = tokens.val_check_interval, step == tokens.train_steps
    if not (last or (every > 0 and step % every == 0)):
        return None
    return validate(training, corpus.validation)


def _say_saved(run: Session) -> None:
    """A line for each save that has ended."""
    run.copies.say()
    for saved in run.saver.reports():
        run.stopper.saved(saved.durable)
        run.life.post_save_checkpoint(run.training, saved)
        run.evaluations.saved(saved)
        if saved.failure:
            run.failed.clear()  # the last one alone is asked for
            run.failed[saved.step] = saved.failure
            run.report.say(f"{saved}; earlier checkpoints are whole", "error")
        else:
            run.report.say(f"Saved checkpoint {saved}")
        if saved.follow_up:
            run.report.say(f"{saved.folder} stands, but then: {saved.follow_up}", "warning")


def _is_due(checkpoints: CheckpointsConfig, step: int, last: int) -> bool:
    """Return whether a checkpoint is written after this step."""
    final = step == last and checkpoints.save_final_state
    return final or step % checkpoints.checkpoint_interval == 0
