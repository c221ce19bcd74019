"""What a run says: console lines, a progress bar on a terminal, and one JSON object a step."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kenotron_dist import Mesh
from kenotron_models import training_flops
from kenotron_train.config import Config
from kenotron_train.step import StepResult
from kenotron_train.validation import Validation, perplexity

LEVELS = ("debug", "info", "warning", "error", "critical", "passive")


def short(value: float) -> str:
    """Three significant digits with K, M, G, T or P: 2.05K, 0.0123, 3e-05."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


class Report:
    """Speaks for the whole run; every rank has one and only the first rank's is heard.

    Lines look like Nanotron's. ``metrics.jsonl`` in the checkpoints folder has full precision.
    Use as a context manager: it owns the file and the progress bar.
    """

    def __init__(self, config: Config, mesh: Mesh, first_step: int) -> None:
        self._config, self._speaks = config, mesh.rank == 0
        self._level = LEVELS.index(config.logging.log_level)
        coords = mesh.coords
        self._place = f"DP={coords['dp']}|PP={coords['pp']}|TP={coords['tp']}"
        self._world = config.world_size
        self._began, self._seconds = time.perf_counter(), 0.0
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._file = None
        if self._speaks:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")  # a sample shall not end a run
            self._file_path = Path(config.checkpoints.checkpoints_path) / "metrics.jsonl"
            self._file = _open_metrics(self._file_path.parent, first_step)
            if self._console.is_terminal:
                self._bar = self._progress(first_step)

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()

    def say(self, text: str, level: str = "info") -> None:
        """Print a line (or several) with time and place."""
        if not self._speaks or LEVELS.index(level) < self._level:
            return
        stamp = time.strftime("%m/%d/%Y %H:%M:%S")
        for line in text.splitlines():
            self._print(f"{stamp} [{level.upper()}|{self._place}]: {line}")

    def start_step(self) -> None:
        """The clock of a step starts now."""
        self._began = time.perf_counter()

    def end_step(self) -> None:
        """It stops: validation and saving are no part of a step's time."""
        self._seconds = time.perf_counter() - self._began

    def step(
        self,
        step: int,
        result: StepResult,
        consumed_tokens: int,
        validation: Validation | None = None,
    ) -> None:
        """Report a finished step: one metrics object, and a line at the configured interval."""
        if not self._speaks or self._file is None:
            return
        seconds = self._seconds
        speed = self._config.batch_tokens(self._config.stage_at(step)) / seconds
        metrics: dict[str, Any] = {
            "step": step,
            "lm_loss": _or_null(result.loss),
            "grad_norm": _or_null(result.grad_norm),
            "lr": result.lr,
            "consumed_tokens": consumed_tokens,
            "tokens_per_sec": speed,
        }
        if result.loss_scale is not None:
            metrics["next_loss_scale"] = result.loss_scale.factor
        if result.nonfinite is not None:
            metrics |= {"skipped": result.skipped, "nonfinite": str(result.nonfinite)}
            self.say(f"step {step}: {_outcome(result)}: {result.nonfinite}", "warning")
        if validation is not None:
            metrics |= _validation_metrics(validation)
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        last = self._config.tokens.train_steps
        if step % self._config.logging.iteration_step_info_interval == 0 or step == last:
            self.say(self._line(step, result, consumed_tokens, seconds))
        if validation is not None:
            self.say(f"validation: {step} / {last} | {_validation_line(validation)}")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, loss=f"{result.loss:.3f}")

    def rewind(self, step: int) -> None:
        """The steps after this one are made anew: forget their metrics."""
        if self._file is not None:
            self._file.close()
            self._file = _continue(self._file_path, step + 1)

    def _line(self, step: int, result: StepResult, consumed_tokens: int, seconds: float) -> str:
        config = self._config
        stage = config.stage_at(step)
        speed = config.batch_tokens(stage) / seconds
        flops = training_flops(config.decoder, config.global_batch_size, config.sequence_of(stage))
        tflops = flops / seconds / self._world / 1e12
        fields = {
            "consumed_tokens": short(consumed_tokens),
            "elapsed_time_per_iteration_ms": short(seconds * 1000),
            "tokens_per_sec": short(speed),
            "tokens_per_sec_per_gpu": short(speed / self._world),
            "global_batch_size": short(config.global_batch_size),
            "lm_loss": short(result.loss),
            "lr": short(result.lr),
            "model_tflops_per_gpu": short(tflops),
            "hardware_tflops_per_gpu": short(tflops),
            "grad_norm": short(result.grad_norm),
        }
        if result.nonfinite is not None:
            fields["update"] = _outcome(result)
        listed = " | ".join(f"{name}: {value}" for name, value in fields.items())
        return f"iteration: {step} / {config.tokens.train_steps} | {listed}"

    def _progress(self, first_step: int) -> Progress:
        bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        total = self._config.tokens.train_steps
        bar.add_task("training", total=total, completed=first_step - 1, loss="-")
        bar.start()
        return bar

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._console.print(line, markup=False)
        else:
            print(line, flush=True)


def _outcome(result: StepResult) -> str:
    if result.overflow and result.loss_scale is not None:
        return f"skipped, next with loss scale {result.loss_scale.factor:g}"
    return "skipped" if result.skipped else "made all the same"


def _validation_metrics(validation: Validation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "validation_loss": _or_null(validation.loss),
        "validation_perplexity": _or_null(validation.perplexity),
    }
    if len(validation.sources) > 1:
        found["validation_sources"] = {
            name: {"loss": _or_null(loss), "perplexity": _or_null(perplexity(loss))}
            for name, loss in validation.sources.items()
        }
    return found


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


def _or_null(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return value if math.isfinite(value) else None


def _open_metrics(folder: Path, first_step: int) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _continue(folder / "metrics.jsonl", first_step)
    except OSError as error:
        raise OSError(
            f"cannot write metrics.jsonl in {folder}: {error}; change checkpoints.checkpoints_path "
            "to a folder that can be written"
        ) from error


def _continue(path: Path, first_step: int) -> Any:
    """Open the metrics file; keep only steps before ``first_step``, which a resume repeats."""
    kept = []
    if path.exists() and first_step > 1:
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] < first_step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # a line cut off when the run died
    fresh = path.with_suffix(".new")  # renamed into place: a kill here loses nothing
    file = fresh.open("w")
    file.writelines(kept)
    file.flush()
    fresh.replace(path)
    return file
