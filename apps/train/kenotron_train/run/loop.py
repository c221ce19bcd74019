"""A run from its first step (or where it was stopped) to its last."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from kenotron_ckpt import SaveFailed, Saver
from kenotron_config import Config
from kenotron_data import Corpus
from kenotron_dist import Mesh, all_reduce, barrier, listening
from kenotron_dist.rng import key
from kenotron_engine import DomainWeights, StepResult, Validation, training_step
from kenotron_optim import NonFinite
from kenotron_train.assemble import OwnModel, Training, build_training
from kenotron_train.data.own_data import Hook, check_hook
from kenotron_train.data.stage_dataset import MaskTargets
from kenotron_train.data.stage_loader import Feed
from kenotron_train.data.vocabulary import check_vocabulary
from kenotron_train.evaluate.evaluator import check_evaluate
from kenotron_train.evaluate.validation import validate
from kenotron_train.failures.nonfinite_record import Taken
from kenotron_train.life_cycle import LifeCycle, Together
from kenotron_train.log.banner import introduce
from kenotron_train.log.instrumentation import HISTORY, Look, Watching, check_watching
from kenotron_train.log.report import Report
from kenotron_train.progress import Progress
from kenotron_train.run.domain_weights import write_weights
from kenotron_train.run.evaluations import Evaluations
from kenotron_train.run.host_memory import give_back_free_memory
from kenotron_train.run.own_folder import going_on
from kenotron_train.run.recovery import go_back, goes_back, record, recorded
from kenotron_train.run.resume import resume
from kenotron_train.run.sample import show_sample
from kenotron_train.run.sanity import check_batch, check_state
from kenotron_train.run.saving import bytes_of, check_saved, open_saver, save_run
from kenotron_train.run.stopping import Stopper
from kenotron_train.run.upload import Uploads


@dataclass(frozen=True)
class Outcome:
    """How a run ended; the same on every rank."""

    results: list[StepResult]
    """What the last steps reported, ``HISTORY`` at most; those that were undone are not in it."""
    stopped: str = ""
    """Why it ended before its last step; empty when it did not."""


@dataclass(frozen=True)
class _Run:
    """What the steps of a run work with."""

    training: Training
    feed: Feed
    saver: Saver
    uploads: Uploads
    report: Report
    stopper: Stopper
    watching: Watching
    life: LifeCycle
    evaluations: Evaluations
    failed: dict[int, str] = field(default_factory=dict)
    """Why the last save that failed did, by its step."""


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
    mesh: Mesh,
    config: Config,
    sample: bool = False,
    loader: Hook | None = None,
    *,
    target_mask: MaskTargets | None = None,
    deadline: float = math.inf,
    model: OwnModel | None = None,
    hooks: tuple[LifeCycle, ...] = (),
    leaves: bool = False,
) -> Outcome:
    """Train by the config, until the last step or a signal, whichever comes first.

    It resumes where its folder has checkpoints (``going_on``). A signal ends it with a checkpoint.

    Arguments: the mesh, of the sizes that the config names; the config; whether to end with a
    generated sample; data of one's own for stages with ``dataset: null`` (see
    ``own_data.Hook``); a mask of targets for tests; when the time is over (of ``time.monotonic``):
    the run ends early enough to save; layers of one's own; what is called at moments of the run;
    whether the process ends afterwards, so that signals that come later do not change its status.
    Collective. Raises ValueError or FileNotFoundError for bad input, SaveFailed when the last
    checkpoint is not whole.
    """
    _check(config, loader, mesh)
    asked, config = config, going_on(config, mesh)
    life = Together(hooks)
    life.pre_init(config, mesh)
    training = build_training(config, mesh, model)
    life.post_init(training)
    progress, remark = resume(training, asked=asked)
    training.check_replicas()
    with (
        listening() as signals,
        Report(config, mesh) as report,
        Uploads(config, mesh, report) as uploads,
        open_saver(training, uploads) as saver,
        Watching(training, report, progress.step + 1) as watching,
    ):
        report.begin(progress.step + 1)  # the saver has locked the folder
        introduce(training, report, remark)
        uploads.resumed(progress.step)
        feed = Feed(training, report, loader, target_mask)
        stopper = Stopper(signals, deadline, bytes_of(training), mesh.world.size)
        own = Evaluations(training, report, model is not None, progress.step)
        work = _Run(training, feed, saver, uploads, report, stopper, watching, life, own)
        life.pre_training(training, progress)
        if config.checkpoints.save_initial_state and progress.step == 0:
            _save(work, progress)
        try:
            outcome, progress = _steps(work, progress)
        finally:
            feed.close()
        _finish(work, outcome, progress)
        life.post_training(training, progress)
        if sample and config.tokenizer.tokenizer_name_or_path is None and not outcome.stopped:
            show_sample(training, report)
        barrier(mesh.world)  # a launcher ends all ranks when the first has left
        signals.finished = leaves
    return outcome


def _finish(run: _Run, outcome: Outcome, progress: Progress) -> None:
    """Wait until all is written; read back what a run that was stopped leaves."""
    run.training.optimizer.settle()
    run.watching.finish()
    run.saver.finish()
    _say_saved(run)
    section, step = run.training.config.s3_upload, progress.step
    if step in run.failed:
        raise SaveFailed(f"the run is over, but without its last checkpoint: {run.failed[step]}")
    if outcome.stopped:
        if section is None or not section.remove_after_upload:  # else its copy is read back
            check_saved(run.saver, step)
        run.report.say(f"Stopped after step {step}, all of it saved: {outcome.stopped}")
    run.uploads.finish()
    with run.training.mesh.pulse.busy("closing trackers"):
        run.report.close()


def _check(config: Config, loader: Hook | None, mesh: Mesh) -> None:
    """Refuse what cannot be run, and ranks that were started with different configs."""
    check_hook(config, loader)
    check_watching(config)
    check_evaluate(config.evaluate)
    check_vocabulary(config)
    own = torch.tensor([key(json.dumps(asdict(config)), bits=56)], device=mesh.device)
    if all_reduce(own, mesh.world, op="max") != all_reduce(own, mesh.world, op="min"):
        raise ValueError(
            f"rank {mesh.rank}: the ranks were started with different configs: give all of them "
            "the same file and --set flags"
        )


def _steps(run: _Run, progress: Progress) -> tuple[Outcome, Progress]:
    """All steps that are left, or until the run is stopped; and how far it is then."""
    training, report, stopper, watching = run.training, run.report, run.stopper, run.watching
    config = training.config
    results: deque[StepResult] = deque(maxlen=HISTORY)
    while progress.step < config.tokens.train_steps and not (stopper.reason or watching.is_over):
        stage = run.feed.stage(progress)
        progress = progress.with_data(stage.number, stage.fingerprint)
        step, place = progress.step + 1, stage.loader.cursor
        if place in progress.left_out:
            stage.next_batch(step)
            progress = progress.past(stage.loader.cursor)
            continue
        with watching.step(step) as look:
            batch = watching.batch(partial(stage.next_batch, step))
            taken = Taken(batch, stage, replace(progress, cursor=place))
            result = _step(run, taken, look)
        stopper.count_votes()
        if result.nonfinite and result.skipped and not result.overflow:
            report.say(f"step {step}: {record(training, taken, result.nonfinite)}")
        if goes_back(training, result) and result.nonfinite:
            progress = _return(run, taken.progress, result.nonfinite)
            for _ in range(min(len(results), step - 1 - progress.step)):
                results.pop()
            continue
        results.append(result.in_short())
        progress = progress.after(config, stage.loader.cursor, result)
        validation = _validate(training, step, stage.corpus)
        run.life.post_train_step(training, progress, result)
        saves = _is_due(config, step) or stopper.save
        if saves:
            watching.saving(partial(_save, run, progress))
        held_out = partial(validate, training, stage.corpus.validation, averages=False)
        found = None
        if not stopper.reason:
            found = run.evaluations.after(step, saves, validation, held_out)
        consumed = progress.tokens, progress.samples
        watching.report(step, result, batch, consumed, validation, found, progress.state.figures)
        _say_saved(run)
        run.uploads.say()
        if training.mesh.device.type == "cpu":
            give_back_free_memory(step)
    if stopper.reason and not _is_due(config, progress.step):
        _save(run, progress)
    stopped = stopper.reason if progress.step < config.tokens.train_steps else ""
    return Outcome(list(results), stopped), progress


def _step(run: _Run, taken: Taken, look: Look) -> StepResult:
    """One step, between the checks that the config asks for."""
    training, batch, progress = run.training, taken.batch, taken.progress
    step = progress.step + 1
    checked = not training.config.general.ignore_sanity_checks
    if checked:
        check_batch(training, batch, step)
    with recorded(training, taken):
        result = training_step(
            training, batch, step, partial(_before_update, run), progress.schedule_start, look,
            progress.state, taken.stage.objective(progress),
        )  # fmt: skip
    if checked and not goes_back(training, result):
        check_state(training, result, step)
    return result


def _before_update(run: _Run) -> None:
    """Wait until no checkpoint reads parameters; start the vote to stop, which nothing waits for.

    Collective over the mesh.
    """
    run.watching.saving(run.saver.wait)
    run.stopper.vote(run.training.mesh)


def _save(run: _Run, progress: Progress) -> None:
    run.life.pre_save_checkpoint(run.training, progress)
    save_run(run.saver, run.training, progress)
    if (weights := progress.state.find(DomainWeights)) and run.training.mesh.rank == 0:
        if trouble := write_weights(run.saver.folder, progress.step, weights):
            run.report.say(trouble, "warning")


def _return(run: _Run, progress: Progress, found: NonFinite) -> Progress:
    """Go back to the newest checkpoint: model, place in the data and metrics."""
    progress, about = go_back(run.training, run.saver, progress, found)
    _say_saved(run)
    run.feed.close()
    run.report.rewind(progress.step)
    run.report.say(about, "warning")
    return progress


def _validate(training: Training, step: int, corpus: Corpus) -> Validation | None:
    """Loss on held-out samples, where the config asks for it after this step."""
    tokens = training.config.tokens
    every, last = tokens.val_check_interval, step == tokens.train_steps
    if not (last or (every > 0 and step % every == 0)):
        return None
    return validate(training, corpus.validation)


def _say_saved(run: _Run) -> None:
    """A line for each save that has ended."""
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


def _is_due(config: Config, step: int) -> bool:
    """Whether a checkpoint is written after this step."""
    checkpoints = config.checkpoints
    last = step == config.tokens.train_steps and checkpoints.save_final_state
    return last or step % checkpoints.checkpoint_interval == 0
