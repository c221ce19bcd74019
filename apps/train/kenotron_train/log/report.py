"""Output of a run: console lines, a progress bar on a terminal, metrics.jsonl and trackers."""

from __future__ import annotations

import io
import sys
import time

from rich.console import Console

from kenotron_command import short
from kenotron_dist import Mesh
from kenotron_engine import Validation, perplexity
from kenotron_train.assemble import TrainingRun
from kenotron_train.log.domain_figures import domain_lines
from kenotron_train.log.figures import Meter, StepFigures
from kenotron_train.log.line_writer import LineWriter
from kenotron_train.log.metrics_file import MetricsFile
from kenotron_train.log.printing import StandardOutput, on_screen
from kenotron_train.log.progress_bar import ProgressBar
from kenotron_train.log.step_row import StepRows
from kenotron_train.log.trackers import Trackers
from kenotron_train.log_plan import LogPlan

LOG = "log.txt"
"""In ``checkpoints_path``: every line of a run and of those that went on from it."""
LEVELS = ("debug", "info", "warning", "error", "critical", "passive")


class Report:
    """Speaks for the whole run; every rank has one and only the first rank's is heard.

    Lines look like Nanotron's; on a terminal a step is a short row, and the whole lines are in
    ``log.txt`` in the checkpoints folder. ``metrics.jsonl`` there has full precision.
    Use as a context manager: it owns the file, the trackers and the progress bar, from ``begin``
    on.
    """

    def __init__(self, plan: LogPlan, meter: Meter, mesh: Mesh) -> None:
        self._plan, self.meter, self._speaks = plan, meter, mesh.rank == 0
        self._level = LEVELS.index(plan.logging.log_level)
        coords = mesh.coords
        self._place = f"DP={coords['dp']}|PP={coords['pp']}|TP={coords['tp']}"
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._log: LineWriter | None = None
        self._rows = StepRows(plan.train_steps)
        self._output = StandardOutput(f"{plan.folder / 'metrics.jsonl'} has all figures")
        self._bar: ProgressBar | None = None
        self._journal: MetricsFile | None = None
        self._trackers: Trackers | None = None
        if self._speaks and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a sample shall not end a run

    def begin(self, first_step: int) -> None:
        """Open the files in the run's folder, which must be this run's alone."""
        if not self._speaks:
            return
        plan = self._plan
        self._journal = MetricsFile(plan.folder, first_step, lambda text: self.say(text, "warning"))
        if self._journal.aside is not None:
            self.say(f"Metrics of an earlier run are kept in {self._journal.aside}", "warning")
        self._trackers = Trackers(plan, first_step, lambda text: self.say(text, "warning"))
        self._log = LineWriter(plan.folder / LOG, self._show_warning)
        if on_screen() and not self._console.is_dumb_terminal:
            self._output.show(lambda: self._open_bar(plan.train_steps, first_step))

    def _open_bar(self, steps: int, first_step: int) -> None:
        self._bar = ProgressBar(self._console, steps, first_step)

    def close(self) -> None:
        """Close files, trackers and the bar; what a tracker has to send is waited for."""
        if self._bar is not None:
            self._output.show(self._bar.stop)
        if self._journal is not None:
            self._journal.close()
        if self._trackers is not None:
            self._trackers.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str, level: str = "info") -> None:
        """Print a line (or several) with time and place."""
        if not self._speaks or LEVELS.index(level) < self._level:
            return
        for line in self._stamped(text, level):
            self._print(line)
            if self._log is not None:
                self._log.write(line)

    def _stamped(self, text: str, level: str) -> list[str]:
        stamp = time.strftime("%m/%d/%Y %H:%M:%S")
        begin = f"{stamp} [{level.upper()}|{self._place}]"
        return [f"{begin}: {self._plan.mask.line(line)}" for line in text.splitlines()]

    def _show_warning(self, text: str) -> None:
        """Warn of the log itself, which must not be written to now."""
        for line in self._stamped(text, "warning"):
            self._print(line)

    def step(self, figures: StepFigures) -> None:
        """Report a finished step: one metrics object, and a line at the configured interval."""
        if self._journal is None or self._trackers is None:
            return
        step, result, validation = figures.step, figures.result, figures.validation
        if result.nonfinite is not None:
            self.say(f"step {step}: {_outcome(figures)}: {result.nonfinite}", "warning")
        if result.reason:
            self.say(f"step {step}: skipped: {result.reason}", "warning")
        metrics = self._plan.mask.keys(self.meter.metrics(figures))
        self._journal.write(metrics)
        self._trackers.log(step, metrics)
        last = self._plan.train_steps
        self._rows.took(figures.times.step)
        if step % self._plan.logging.iteration_step_info_interval == 0 or step == last:
            self._say_step(figures)
            for line in domain_lines({**result.figures, **figures.state}):
                self.say(line)
        if validation is not None:
            self.say(f"validation: {step} / {last} | {_validation_line(validation)}")
        if self._bar is not None:
            speed = self.meter.tokens_per_second(figures)
            tflops, mfu = self.meter.tflops(figures), self.meter.mfu(figures)
            work = f"{short(tflops * 1e12)}FLOP/s" if mfu is None else f"MFU {mfu:.1%}"
            loss, pace, bar = f"{result.loss:.3f}", f"{short(speed)} tok/s", self._bar
            self._output.show(lambda: bar.update(step, loss, pace, work))

    def hold(self, figures: StepFigures) -> None:
        """Keep the metrics of a step that is about to be saved: see ``MetricsFile.hold``."""
        if self._journal is not None:
            metrics = self._plan.mask.keys(self.meter.metrics(figures))
            del metrics["memory_gb"]  # it is measured at the end of the step
            self._journal.hold(metrics)

    def rewind(self, step: int) -> None:
        """The steps after this one are trained again: forget their metrics."""
        if self._journal is not None and self._trackers is not None:
            self._journal.rewind(step)
            self._trackers.rewind(step)

    def _say_step(self, figures: StepFigures) -> None:
        """A whole line; on a terminal a row, and the line in the log alone."""
        line = self._line(figures)
        if self._bar is None:
            self.say(line)
            return
        if LEVELS.index("info") < self._level:
            return
        result, speed = figures.result, self.meter.tokens_per_second(figures)
        remark = _outcome(figures) if result.nonfinite or result.reason else ""
        columns = self._console.width
        numbers = (figures.step, result.loss, result.grad_norm, result.lr, speed)
        self._print(self._rows.row(*numbers, remark=remark, columns=columns))
        if self._log is not None:
            self._log.write(self._stamped(line, "info")[0])

    def _line(self, figures: StepFigures) -> str:
        result, seconds = figures.result, figures.times.step
        speed, tflops = self.meter.tokens_per_second(figures), self.meter.tflops(figures)
        fields = {
            "consumed_tokens": short(figures.consumed_tokens),
            "elapsed_time_per_iteration_ms": short(seconds * 1000),
            "tokens_per_sec": short(speed),
            "tokens_per_sec_per_gpu": short(speed / self.meter.ranks),
            "global_batch_size": short(figures.samples),
            "lm_loss": short(result.loss),
            **{name: short(x) for name, x in result.figures.items() if isinstance(x, float)},
            "lr": short(result.lr),
            "model_tflops_per_gpu": short(tflops),
            "hardware_tflops_per_gpu": short(tflops),
            "grad_norm": short(result.grad_norm),
        }
        if result.nonfinite or result.reason:
            fields["update"] = _outcome(figures)
        listed = " | ".join(f"{name}: {value}" for name, value in fields.items())
        return f"iteration: {figures.step} / {self._plan.train_steps} | {listed}"

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._output.show(lambda: self._console.print(line, markup=False))
        else:
            self._output.show(lambda: print(line, flush=True))


def open_report(training: TrainingRun) -> Report:
    """Return the output of a training's run, to be entered."""
    mesh = training.mesh
    meter = Meter(training.plan, training.data, mesh.world.size, mesh.device)
    return Report(training.log, meter, mesh)


def _outcome(figures: StepFigures) -> str:
    result, scale = figures.result, figures.state.get("next_loss_scale")
    if result.overflow and scale is not None:
        return f"skipped, next with loss scale {scale:g}"
    return "skipped" if result.skipped else "made all the same"


def _validation_line(validation: Validation) -> str:
    """Loss and perplexity over all, then those of each of several sources."""
    parts = [
        f"val_loss: {short(validation.loss)}",
        f"val_perplexity: {short(validation.perplexity)}",
    ]
    if validation.averaged is not None:
        parts.append(f"val_loss_averaged: {short(validation.averaged)}")
    if len(validation.sources) > 1:
        parts += [
            f"{name}: {short(loss)} ({short(perplexity(loss))})"
            for name, loss in validation.sources.items()
        ]
    return " | ".join(parts)
