"""What a run says: console lines, a progress bar on a terminal, metrics.jsonl and trackers."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console

from kenotron_dist import Mesh
from kenotron_train.config import Config
from kenotron_train.figures import Meter, StepFigures, short
from kenotron_train.journal import Journal
from kenotron_train.progress_bar import ProgressBar
from kenotron_train.step import StepResult
from kenotron_train.trackers import Trackers
from kenotron_train.validation import Validation, perplexity

LEVELS = ("debug", "info", "warning", "error", "critical", "passive")


class Report:
    """Speaks for the whole run; every rank has one and only the first rank's is heard.

    Lines look like Nanotron's. ``metrics.jsonl`` in the checkpoints folder has full precision.
    Use as a context manager: it owns the file, the trackers and the progress bar, from ``begin``
    on.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self._config, self._speaks = config, mesh.rank == 0
        self._level = LEVELS.index(config.logging.log_level)
        coords = mesh.coords
        self._place = f"DP={coords['dp']}|PP={coords['pp']}|TP={coords['tp']}"
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: ProgressBar | None = None
        self._journal: Journal | None = None
        self._trackers: Trackers | None = None
        if self._speaks:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")  # a sample shall not end a run
            self._meter = Meter(config, mesh.device)

    def begin(self, first_step: int) -> None:
        """Open the files in the run's folder, which must be this run's alone."""
        if not self._speaks:
            return
        config = self._config
        self._journal = Journal(Path(config.checkpoints.checkpoints_path), first_step)
        if self._journal.aside is not None:
            self.say(f"Metrics of an earlier run are kept in {self._journal.aside}", "warning")
        self._trackers = Trackers(config, first_step, lambda text: self.say(text, "warning"))
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = ProgressBar(self._console, config.tokens.train_steps, first_step)

    def close(self) -> None:
        """Close files, trackers and the bar; what a tracker has to send is waited for."""
        if self._bar is not None:
            self._bar.stop()
        if self._journal is not None:
            self._journal.close()
        if self._trackers is not None:
            self._trackers.close()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def say(self, text: str, level: str = "info") -> None:
        """Print a line (or several) with time and place."""
        if not self._speaks or LEVELS.index(level) < self._level:
            return
        stamp = time.strftime("%m/%d/%Y %H:%M:%S")
        for line in text.splitlines():
            self._print(f"{stamp} [{level.upper()}|{self._place}]: {line}")

    def step(self, figures: StepFigures) -> None:
        """Report a finished step: one metrics object, and a line at the configured interval."""
        if self._journal is None or self._trackers is None:
            return
        step, result, validation = figures.step, figures.result, figures.validation
        if result.nonfinite is not None:
            self.say(f"step {step}: {_outcome(result)}: {result.nonfinite}", "warning")
        metrics = self._meter.metrics(figures)
        self._journal.write(metrics)
        self._trackers.log(step, metrics)
        last = self._config.tokens.train_steps
        if step % self._config.logging.iteration_step_info_interval == 0 or step == last:
            self.say(self._line(figures))
        if validation is not None:
            self.say(f"validation: {step} / {last} | {_validation_line(validation)}")
        if self._bar is not None:
            speed = self._meter.tokens_per_second(figures)
            tflops, mfu = self._meter.tflops(figures), self._meter.mfu(figures)
            work = f"{short(tflops * 1e12)}FLOP/s" if mfu is None else f"MFU {mfu:.1%}"
            self._bar.update(step, f"{result.loss:.3f}", f"{short(speed)} tok/s", work)

    def rewind(self, step: int) -> None:
        """The steps after this one are made anew: forget their metrics."""
        if self._journal is not None and self._trackers is not None:
            self._journal.rewind(step)
            self._trackers.rewind(step)

    def _line(self, figures: StepFigures) -> str:
        result, seconds = figures.result, figures.times.step
        speed, tflops = self._meter.tokens_per_second(figures), self._meter.tflops(figures)
        fields = {
            "consumed_tokens": short(figures.consumed_tokens),
            "elapsed_time_per_iteration_ms": short(seconds * 1000),
            "tokens_per_sec": short(speed),
            "tokens_per_sec_per_gpu": short(speed / self._config.world_size),
            "global_batch_size": short(self._config.global_batch_size),
            "lm_loss": short(result.loss),
            "lr": short(result.lr),
            "model_tflops_per_gpu": short(tflops),
            "hardware_tflops_per_gpu": short(tflops),
            "grad_norm": short(result.grad_norm),
        }
        if result.nonfinite is not None:
            fields["update"] = _outcome(result)
        listed = " | ".join(f"{name}: {value}" for name, value in fields.items())
        return f"iteration: {figures.step} / {self._config.tokens.train_steps} | {listed}"

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._console.print(line, markup=False)
        else:
            print(line, flush=True)


def _outcome(result: StepResult) -> str:
    if result.overflow and result.loss_scale is not None:
        return f"skipped, next with loss scale {result.loss_scale.factor:g}"
    return "skipped" if result.skipped else "made all the same"


def _validation_line(validation: Validation) -> str:
    """Loss and perplexity over all, then those of each of several sources."""
    parts = [
        f"val_loss: {short(validation.loss)}",
        f"val_perplexity: {short(validation.perplexity)}",
    ]
    if len(validation.sources) > 1:
        parts += [
            f"{name}: {short(loss)} ({short(perplexity(loss))})"
            for name, loss in validation.sources.items()
        ]
    return " | ".join(parts)
