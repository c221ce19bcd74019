"""TensorBoard and Weights & Biases: metrics of a run where people look at them.

A tracker has ``log`` and ``close``. Each is imported when it is asked for; only the first rank has
any, and one that fails is left behind: it never ends a training.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kenotron_config import public
from kenotron_train.log.run_name import run_name
from kenotron_train.log_plan import LogPlan

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
WANDB_VARIABLES = ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY")
"""Any of them in the environment asks for Weights & Biases, unless the config names trackers."""


class Tracker(Protocol):
    """Takes the figures of steps."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Figures of a step, by name; names have slashes."""

    def rewind(self, step: int) -> str:
        """Forget the steps after this one; a sentence where that cannot be, else nothing."""

    def close(self) -> None:
        """Write all that waits; called once."""


def chosen_trackers(
    names: Sequence[str] | None, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Names of the trackers of a run: those of ``logging.trackers``, or wandb by its variables.

    ``WANDB_MODE=disabled`` leaves wandb out in any case.
    """
    if names is None:
        names = ("wandb",) if any(map(environ.get, WANDB_VARIABLES)) else ()
    off = environ.get("WANDB_MODE") == "disabled"
    return tuple(name for name in dict.fromkeys(names) if not (off and name == "wandb"))


def check_trackers(names: Sequence[str] | None) -> None:
    """Raise ValueError when a chosen tracker is not installed."""
    for name in chosen_trackers(names):
        if importlib.util.find_spec(PACKAGES[name]) is None:
            asked = "logging.trackers" if names else "the environment (WANDB_*)"
            off = "take it out of the list" if names else "set WANDB_MODE=disabled"
            raise ValueError(
                f"{asked} asks for {name}, which is not installed: pip install "
                f"'./apps/train[{name}]' in the repository, or {off}"
            )


class TensorBoard:
    """Event files in ``<checkpoints_path>/tensorboard``; steps done again replace the old."""

    def __init__(self, plan: LogPlan, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = functools.partial(SummaryWriter, str(plan.folder / "tensorboard"))
        self._writer = self._open(purge_step=first_step if first_step > 1 else None)
        self._writer.add_text("config", f"```yaml\n{plan.yaml}\n```", first_step - 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """One event for each figure."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> str:
        """Mark the events after the step as replaced."""
        self._writer.close()
        self._writer = self._open(purge_step=step + 1)
        return ""

    def close(self) -> None:
        """Write what waits."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, offline with ``WANDB_MODE=offline``; its files lie in
    ``<checkpoints_path>/wandb``. A resumed training continues in its run."""

    def __init__(self, plan: LogPlan, first_step: int) -> None:
        import wandb

        self._file = plan.folder / "wandb_run.json"
        earlier = _earlier(self._file) if first_step > 1 else {}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or public(plan.general.project),
            name=os.environ.get("WANDB_NAME") or run_name(public(plan.general.run)),
            config={"nanotron_config": plan.keys},
            dir=str(plan.folder),
            id=earlier.get("id"),
            resume="allow" if earlier else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        # A history only goes forward: its own count runs ahead of the steps after each way back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._ahead, self._attempt = earlier.get("ahead", 0), earlier.get("attempt", 1)
        self._last = first_step - 1 + self._ahead
        self._remember()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """All figures of the step at once; pictures have ``step`` along x."""
        self._last = step + self._ahead
        self._run.log({**scalars, "step": step, "attempt": self._attempt}, step=self._last)

    def rewind(self, step: int) -> str:
        """Keep what there is, and continue as another attempt: a history cannot be cut."""
        self._ahead, self._attempt = max(self._ahead, self._last - step), self._attempt + 1
        self._remember()
        return (
            f"wandb keeps the steps after {step} as attempt {self._attempt - 1}, and has them made "
            f"again as attempt {self._attempt}, at the same places of the axis `step`"
        )

    def _remember(self) -> None:
        known = {"id": self._run.id, "ahead": self._ahead, "attempt": self._attempt}
        self._file.write_text(json.dumps(known) + "\n", encoding="utf-8")

    def close(self) -> None:
        """End the run and wait until it is written or sent.

        ``finish`` alone leaves the last of it to a process that goes when this one does.
        """
        import wandb

        self._run.finish()
        wandb.teardown()


MAKERS: dict[str, Callable[[LogPlan, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Trackers:
    """All trackers of a run. ``complain`` is called once for each that fails."""

    def __init__(self, plan: LogPlan, first_step: int, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self._open: dict[str, Tracker] = {}
        for name in chosen_trackers(plan.logging.trackers):
            try:
                self._open[name] = MAKERS[name](plan, first_step)
            except Exception as error:
                self._lost(name, error)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Figures of a step as metrics.jsonl has them; what is no number is left out."""
        if not self._open:
            return
        scalars = flat(metrics)
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, scalars)
            except Exception as error:
                del self._open[name]
                self._lost(name, error)

    def rewind(self, step: int) -> None:
        """The steps after this one are trained again."""
        for name, tracker in list(self._open.items()):
            try:
                if kept := tracker.rewind(step):
                    self._complain(f"{kept}; metrics.jsonl has the run as it continues")
            except Exception as error:
                del self._open[name]
                self._lost(name, error)

    def close(self) -> None:
        """Close all."""
        for name, tracker in self._open.items():
            try:
                tracker.close()
            except Exception as error:
                self._lost(name, error)
        self._open = {}

    def _lost(self, name: str, error: Exception) -> None:
        self._complain(
            f"{name} gets no more figures: {type(error).__name__}: {error}; metrics.jsonl has all"
        )


def flat(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by their path: ``layers`` and the step's number give no part of it."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= flat(value, prefix if name == "layers" else f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found[prefix + name] = float(value)
    return found


def _earlier(path: Path) -> dict[str, Any]:
    """The run that an earlier start had: id, count ahead, attempt; empty when it cannot be read."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        counts = {key: int(known[key]) for key in ("ahead", "attempt") if key in known}
        return {"id": str(known["id"]), **counts}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
