"""Evaluations of a run: when they are due, on its own ranks or as jobs, and what they found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kenotron_ckpt import MANIFEST, SaveReport
from kenotron_config import EvaluateConfig, EvaluationJobConfig
from kenotron_data.config import DatasetStageConfig
from kenotron_engine import Validation
from kenotron_train.assemble import TrainingRun
from kenotron_train.evaluate.evaluation_job import (
    EvaluationJob,
    script_of_evaluation,
    submit_evaluation,
)
from kenotron_train.evaluate.evaluator import Evaluator
from kenotron_train.evaluate.results import FOLDER, read_evaluation
from kenotron_train.log.report import Report

LOOK = 10.0
"""Seconds from one look for results of jobs to the next."""


class Evaluations:
    """The evaluations of a run; every rank has one.

    Results of jobs come when they come: the first rank looks for their files after each step, and
    one that is there goes to metrics.jsonl and trackers with that step's figures, which name the
    step that was evaluated. A run that resumes takes what came since its checkpoint.

    Args:
        training: the run.
        report: hears of results and failures.
        section: of the config; None: there are none.
        own_model: whether the layers are the program's own, which a job cannot build.
        step: the step after which the run resumes.
        optional: whether tasks that cannot be evaluated are reported and left out.

    Collective over the mesh. Raises ValueError for tasks that cannot be evaluated.
    """

    def __init__(
        self,
        training: TrainingRun,
        report: Report,
        section: EvaluateConfig | None,
        *,
        own_model: bool,
        step: int = 0,
        optional: bool = False,
    ) -> None:
        self._training, self._report, self._section = training, report, section
        self._folder = training.log.folder / FOLDER
        self._evaluator: Evaluator | None = None
        self._job: EvaluationJob | None = None
        self._seen: dict[str, int] = {}
        self._next_look = 0.0
        try:
            self._start(section, own_model, step)
        except ValueError as error:
            if not optional:
                raise
            self._section = None
            report.say(f"nothing is evaluated during the training: {error}", "warning")

    def _start(self, section: EvaluateConfig | None, own_model: bool, step: int) -> None:
        if section is None:
            return
        training, data, plan = self._training, self._training.data, self._training.log
        tokenizer = data.tokenizer.tokenizer_name_or_path, data.tokenizer.tokenizer_revision
        if section.ranks == "job":
            self._job = EvaluationJob(
                asked=section.job or EvaluationJobConfig(),
                trained=training.cost.parallelism,
                project=plan.general.project,
                run=training.checkpoints.section.checkpoints_path,
                mask=plan.mask,
            )
            _check_job(self._job, data.stages if section.perplexity else (), own_model)
            self._seen = self._seen_before(step)
        else:
            length = data.tokens.sequence_length
            self._evaluator = Evaluator(training, section, tokenizer, length)
            for note in self._evaluator.notes:
                self._report.say(note, "warning")

    def after(
        self,
        step: int,
        saves: bool,
        validation: Validation | None,
        validate: Callable[[], Validation | None],
    ) -> dict[str, Any] | None:
        """Evaluate after a step, where that is due; or return what a job has found.

        Args:
            step: the step that was made.
            saves: whether a checkpoint of it is written.
            validation: the loss on held-out samples, where this step has measured it.
            validate: measures it.

        Returns:
            The object for metrics.jsonl; None: there is nothing new. Collective over the mesh.
        """
        section = self._section
        if section is None:
            return None
        if self._evaluator is None:
            return self._arrived()
        last = step == self._training.data.tokens.train_steps
        if not (last or (saves if section.interval is None else step % section.interval == 0)):
            return None
        found = self._evaluator.evaluate(step, lambda: validation or validate())
        if found.failure:
            about = f"evaluation at step {step} failed: {found.failure}; the training continues"
            self._report.say(about, "error")
        for line in found.lines():
            self._report.say(f"evaluation: {step} | {line}")
        return found.to_metrics()

    def saved(self, report: SaveReport) -> None:
        """Submit a job for a checkpoint that stands, where one is due. For the first rank."""
        section, job, training = self._section, self._job, self._training
        if section is None or job is None or training.mesh.rank or report.failure:
            return
        last = report.step == training.data.tokens.train_steps
        if section.interval and report.step % section.interval and not last:
            return
        try:
            said = submit_evaluation(job, report.folder.absolute())
        except (OSError, ValueError) as error:
            text = f"no evaluation of step {report.step} was submitted: {error}"
            self._report.say(f"{text}; the training continues", "error")
        else:
            self._report.say(said)

    def _files(self) -> dict[str, int]:
        """Files of results, and when they were written."""
        found = {}
        with contextlib.suppress(OSError):
            for file in sorted(self._folder.glob("*.json"), key=lambda file: len(file.name)):
                found[file.name] = file.stat().st_mtime_ns
        return found

    def _seen_before(self, step: int) -> dict[str, int]:
        """Files of results that are older than the checkpoint of a step; all where it has none."""
        found = self._files()
        try:
            saved = (self._folder.parent / str(step) / MANIFEST).stat().st_mtime
        except OSError:
            return found
        return {name: ns for name, ns in found.items() if ns / 1e9 < saved - LOOK}

    def _arrived(self) -> dict[str, Any] | None:
        """The first result of a job that was not there before. On the first rank."""
        if self._training.mesh.rank or time.monotonic() < self._next_look:
            return None
        for name, written in self._files().items():
            if self._seen.get(name) != written:
                self._seen[name] = written
                if (found := read_evaluation(self._folder / name)) is not None:
                    self._report.say(f"evaluation: the job of step {found['evaluated_step']} ended")
                    return found
        self._next_look = time.monotonic() + LOOK
        return None


def _check_job(
    job: EvaluationJob, held_out: tuple[DatasetStageConfig, ...], own_model: bool
) -> None:
    """Raise ValueError for what a job cannot evaluate; ``held_out``: stages that it would read."""
    if own_model:
        raise ValueError(
            "evaluate.ranks: job was given, but the layers of the model are the program's own, "
            "which a job does not have; set it to training"
        )
    if any(stage.data.dataset is None for stage in held_out):
        raise ValueError(
            "evaluate.perplexity: true was given with evaluate.ranks: job, but data are the "
            "program's own (dataset: null), which a job does not have; set ranks to training, or "
            "perplexity to false"
        )
    step_folder = Path(job.run).absolute() / "1"
    script_of_evaluation(job, step_folder, Path.cwd())  # all jobs have the same ranks
