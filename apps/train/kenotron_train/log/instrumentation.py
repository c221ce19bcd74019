"""Instrumentation of a run: times, profiles, layers, the table of speeds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kenotron_config import MetricsLoggingConfig
from kenotron_data import Batch
from kenotron_dist.diagnosis import record
from kenotron_engine import LayerMetrics, StepResult, Validation
from kenotron_optim import Slices
from kenotron_train.assemble import TrainingRun
from kenotron_train.log.figures import StepFigures, UsedMemory, named_peak
from kenotron_train.log.profiling import Profile
from kenotron_train.log.rank_times import RankTimes, microseconds
from kenotron_train.log.report import Report
from kenotron_train.log.speed_table import STEPS, add_row, check_table, is_benchmark, table_row
from kenotron_train.log.stopwatch import StepTimes, Stopwatch
from kenotron_train.log.trackers import check_trackers

HISTORY = 10_000
"""Steps whose figures are kept in memory, on each rank: the last ones."""

Look = Callable[[Slices], None]
"""Function that a step calls with the whole gradient."""


def check_watching(trackers: Sequence[str] | None, table: str | None) -> None:
    """Raise ValueError for what a run would find out too late: tracker, table, peak."""
    check_trackers(trackers)
    named_peak()
    if table is not None:
        check_table(table)


def is_detailed(section: MetricsLoggingConfig | None, step: int) -> bool:
    """Return whether layers are looked at in this step."""
    return bool(section and section.log_level and step % section.log_detail_interval == 0)


class Watching:
    """Watches a run, one step after the other; a context manager. Every rank has one.

    Collective over the mesh, like everything here.
    """

    def __init__(self, training: TrainingRun, report: Report, first_step: int) -> None:
        self._training, self._report = training, report
        mesh = training.mesh
        # nccl's waits are the device's: this process continues.
        self._watch = Stopwatch(lambda: mesh.pulse.waited if mesh.backend == "gloo" else None)
        plan = training.log
        self._row, self.rank_times = microseconds(StepTimes(0.0)), RankTimes(mesh)
        self._every = plan.logging.iteration_step_info_interval
        self._recorder = record(mesh) if plan.logging.communication and mesh.rank == 0 else None
        self._sent: dict[str, int] | None = None
        self._steps: deque[StepFigures] = deque(maxlen=HISTORY)
        """For the table of speeds, where one is asked for."""
        self._count = 0
        self._layers: LayerMetrics | None = None
        self._benchmark = is_benchmark(training.mesh)
        self._table = plan.general.benchmark_csv_path
        self._has_table = self._benchmark or self._table is not None
        self._profile = Profile(plan.profiler, plan.folder, mesh, first_step, report.say)
        self._section = plan.layers
        if self._section and self._section.log_level and training.plan.compile:
            report.say(
                "metrics_logging: with model.compile there are no statistics of activations, only "
                "those of parameters and gradients",
                "warning",
            )

    def __enter__(self) -> Watching:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        if self._recorder is not None:
            self._recorder.close()

    @property
    def is_over(self) -> bool:
        """True where a run that only measures has made its steps."""
        return self._benchmark and self._count >= STEPS

    @contextmanager
    def step(self, step: int) -> Iterator[Look]:
        """Around all that a step's time is; gives what ``training_step`` shall show gradients."""
        detailed = is_detailed(self._section, step)
        self._layers = LayerMetrics(self._training) if detailed else None
        if self._recorder is not None:
            self._recorder.cut()  # what came between the steps
        self._watch.start()
        if self._layers is None:
            yield lambda _: None
        else:
            with self._layers.during():
                yield self._layers.look
        self._watch.stop()
        self._row = microseconds(self._watch.times)
        if self._recorder is not None:
            self._sent = self._recorder.bytes_per_axis(self._recorder.cut())

    @property
    def row(self) -> tuple[int, ...]:
        """Times of the last step, for ``RankTimes`` of all ranks."""
        return self._row

    def batch(self, read: Callable[[], Batch]) -> Batch:
        """The batch that ``read`` waits for, on this rank's device."""
        with self._watch.waiting():
            return read().to(self._training.mesh.device)

    def saving(self, wait: Callable[[], None]) -> None:
        """Do what keeps the training waiting for a checkpoint."""
        with self._watch.saving():
            wait()

    def figures(
        self,
        step: int,
        result: StepResult,
        samples: int,
        consumed: tuple[int, int],
        validation: Validation | None,
        state: dict[str, Any] | None = None,
    ) -> StepFigures:
        """Return what is known of a step before it is saved.

        ``samples``: of its batch; ``consumed``: tokens and samples since the beginning; ``state``:
        figures of what decides about the next step.
        """
        return StepFigures(
            step=step,
            result=result,
            times=self._watch.times,
            tokens=result.tokens,
            samples=samples,
            consumed_tokens=consumed[0],
            consumed_samples=consumed[1],
            memory=UsedMemory(0.0),
            validation=validation,
            sent=self._sent,
            state=state or {},
        )

    def report(self, known: StepFigures, evaluation: dict[str, Any] | None = None) -> None:
        """Report a step. ``known``: of ``figures``; ``evaluation``: ``Evaluation.to_metrics``."""
        step, result = known.step, known.result
        figures = replace(
            known,
            times=self._watch.times,
            memory=UsedMemory.of_step(self._training.mesh.device),
            evaluation=evaluation,
            layers=self._layers.collect() if self._layers is not None else {},
            slowest=self.rank_times.take() if self._is_logged(step) else None,
        )
        self._count += 1
        if self._has_table:  # without what is as long as there are layers or axes
            short = replace(figures, result=result.in_short(), layers={}, sent=None)
            self._steps.append(short)
        self._report.step(figures)
        self._profile.step()

    def _is_logged(self, step: int) -> bool:
        return step % self._every == 0 or step == self._training.data.tokens.train_steps

    def finish(self) -> None:
        """Write the table of speeds, where one is asked for."""
        path = self._table
        if not self._has_table:
            return
        if not self._steps:
            self._report.say(
                "Benchmark: no step was made, so there is no line: the run in "
                "checkpoints.checkpoints_path is over; give another folder",
                "error",
            )
            return
        row = table_row(self._training, self._report.meter, list(self._steps))
        listed = " | ".join(f"{column}: {value}" for column, value in row.items())
        self._report.say(f"Benchmark: {listed}")
        if path is None or self._training.mesh.rank:
            return
        try:
            add_row(path, row)
        except OSError as error:
            self._report.say(f"general.benchmark_csv_path: no line in {path}: {error}", "error")
